// Which RDMA device, port and address a process reads from. gear_jax/transport/_verbs_device.py chooses by the same
// rules.
#ifndef GEAR_JAX_FFI_TRANSPORT_VERBS_DEVICE_H_
#define GEAR_JAX_FFI_TRANSPORT_VERBS_DEVICE_H_

#include <array>
#include <cstdint>
#include <string>

#include "ffi/transport/transport.h"
#include "ffi/transport/verbs_blob.h"
#include "ffi/transport/verbs_library.h"

namespace gear_jax::transport {

// An open device. Whoever has it closes it.
struct VerbsDevice {
  ibv_context* context = nullptr;
  std::string name;
  ibv_device_attr limits = {};
  uint8_t port = 1;
  Link link = Link::kEthernet;
  uint32_t mtu = 0;  // bytes: what was asked for, or the port's
  uint16_t lid = 0;
  int gid_index = -1;  // -1: addressed by its LID
  std::array<uint8_t, 16> gid = {};
};

// Opens the device that `options` names, or the first one with an active port and a usable address: with a RoCE v2 or
// an InfiniBand GID that is not link-local (`gid_index` takes another), on InfiniBand else with its LID. Returns "" or
// why there is none, device by device.
std::string OpenVerbsDevice(const VerbsLibrary& library, const Options& options, VerbsDevice* device);

// The value of verbs for an MTU in bytes.
ibv_mtu MtuValue(uint32_t bytes);

}  // namespace gear_jax::transport

#endif  // GEAR_JAX_FFI_TRANSPORT_VERBS_DEVICE_H_
