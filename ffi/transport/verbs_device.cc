#if __has_include(<infiniband/verbs.h>)

#include "ffi/transport/verbs_device.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "ffi/transport/error_text.h"

namespace gear_jax::transport {
namespace {

uint32_t MtuBytes(ibv_mtu value) {
  const int exponent = std::clamp<int>(value, IBV_MTU_256, IBV_MTU_4096);
  return 128u << exponent;
}

bool IsZero(const ibv_gid& gid) {
  return std::all_of(gid.raw, gid.raw + 16, [](uint8_t b) { return b == 0; });
}

// What is asked for by index is taken as it is; else the first of a kind that others can reach. "" or why there is
// none.
std::string ChooseGid(const VerbsLibrary& library, const Options& options, int entries, VerbsDevice* device) {
  const int first = std::max(options.gid_index, 0);
  const int last = options.gid_index < 0 ? entries - 1 : options.gid_index;
  for (int i = first; i <= last; ++i) {
    ibv_gid_entry entry = {};
    if (library.query_gid_ex(device->context, device->port, i, &entry, 0, sizeof(entry)) != 0) continue;
    if (IsZero(entry.gid)) continue;
    if (options.gid_index < 0 && (entry.gid_type == IBV_GID_TYPE_ROCE_V1 || IsLinkLocal(entry.gid.raw))) continue;
    device->gid_index = i;
    std::copy(entry.gid.raw, entry.gid.raw + 16, device->gid.begin());
    return "";
  }
  if (options.gid_index >= 0) return "no GID at index " + std::to_string(options.gid_index);
  if (device->link == Link::kInfiniBand) return "";  // within a subnet the LID is enough
  return "no RoCE v2 GID that is not link-local: give its network interface an IP address";
}

// Fills in all but the name. "" or why the device cannot be used.
std::string Describe(const VerbsLibrary& library, const Options& options, VerbsDevice* device) {
  device->port = static_cast<uint8_t>(options.port);
  ibv_port_attr port;
  std::memset(&port, 0, sizeof(port));
  if (library.query_device(device->context, &device->limits) != 0) return "it does not tell its limits";
  if (library.query_port_compat(device->context, device->port, &port) != 0) {
    return "no port " + std::to_string(options.port);
  }
  if (port.state != IBV_PORT_ACTIVE) return "port " + std::to_string(options.port) + " is not active";
  device->link = port.link_layer == IBV_LINK_LAYER_ETHERNET ? Link::kEthernet : Link::kInfiniBand;
  device->lid = device->link == Link::kEthernet ? 0 : port.lid;
  const uint32_t active = MtuBytes(port.active_mtu);
  if (options.mtu > active)
    return "its MTU is " + std::to_string(active) + ", less than " + std::to_string(options.mtu);
  device->mtu = options.mtu == 0 ? active : options.mtu;
  return ChooseGid(library, options, port.gid_tbl_len, device);
}

}  // namespace

ibv_mtu MtuValue(uint32_t bytes) {
  int exponent = IBV_MTU_256;
  while (128u << exponent < bytes) ++exponent;
  return static_cast<ibv_mtu>(exponent);
}

std::string OpenVerbsDevice(const VerbsLibrary& library, const Options& options, VerbsDevice* device) {
  const std::string wanted = options.device.empty() ? "an RDMA device" : "the RDMA device " + options.device;
  const std::string fix = "`python -m gear_jax doctor` lists devices and addresses; transport=\"ucx\" needs none.";
  int count = 0;
  ibv_device** list = library.get_device_list(&count);  // null where the kernel has no RDMA at all
  std::string reasons;
  for (int i = 0; list != nullptr && i < count; ++i) {
    const std::string name = library.get_device_name(list[i]);
    if (!options.device.empty() && name != options.device) continue;
    VerbsDevice found;
    found.name = name;
    found.context = library.open_device(list[i]);
    const std::string reason = found.context == nullptr ? std::string("cannot be opened: ") + std::strerror(errno)
                                                        : Describe(library, options, &found);
    if (reason.empty()) {
      library.free_device_list(list);
      *device = found;
      return "";
    }
    if (found.context != nullptr) library.close_device(found.context);
    reasons += (reasons.empty() ? "" : "; ") + name + ": " + reason;
  }
  if (list != nullptr) library.free_device_list(list);
  return ErrorText("verbs", reasons.empty() ? "none" : reasons, wanted, fix);
}

}  // namespace gear_jax::transport

#endif  // __has_include(<infiniband/verbs.h>)
