#include "cuda/device_registry.h"

#include "ffi/memory_registry.h"

namespace gear_jax {
namespace {

// Makes a device the current one, and afterwards the one that was.
class OnDevice {
 public:
  explicit OnDevice(int ordinal) {
    int devices = 0;
    error_ = cudaGetDeviceCount(&devices);
    // Not found out by CUDA: a call that fails is what compute-sanitizer looks for.
    if (error_ == cudaSuccess && (ordinal < 0 || ordinal >= devices)) error_ = cudaErrorInvalidDevice;
    if (error_ != cudaSuccess) return;
    error_ = cudaGetDevice(&before_);
    if (error_ != cudaSuccess) return;
    error_ = cudaSetDevice(ordinal);
    moved_ = true;
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() {
    if (moved_) cudaSetDevice(before_);
  }
  cudaError_t error() const { return error_; }

 private:
  int before_ = 0;
  bool moved_ = false;
  cudaError_t error_ = cudaSuccess;
};

RegistryFault Failed(cudaError_t error, const char* step) {
  cudaGetLastError();  // else it would show up as another call's
  return {error, step};
}

constexpr size_t kListBytes = kRegistryEntries * sizeof(RegisteredMemory);

// Where kernels on the current device find host memory.
RegistryFault MappedAt(const void* host, const uint8_t** mapped) {
  cudaPointerAttributes attributes{};
  const cudaError_t error = cudaPointerGetAttributes(&attributes, host);
  if (error != cudaSuccess) return Failed(error, "looking at the memory");
  if (attributes.type != cudaMemoryTypeHost || attributes.devicePointer == nullptr) {
    return {cudaSuccess, "the memory is not page-locked and mapped, or not of the host"};
  }
  *mapped = static_cast<const uint8_t*>(attributes.devicePointer);
  return {};
}

RegistryFault Write(RegisteredMemory* entry, const RegisteredMemory& memory, cudaStream_t stream) {
  cudaError_t error = cudaMemcpyAsync(entry, &memory, sizeof(memory), cudaMemcpyHostToDevice, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  return error == cudaSuccess ? RegistryFault{} : Failed(error, "writing an address to the device");
}

// On the current device. Waits once more after the addresses are stale, for the kernels that found them before.
RegistryFault MakeStale(RegisteredMemory* list, const std::vector<int32_t>& entries, cudaStream_t stream) {
  cudaError_t error = cudaDeviceSynchronize();
  for (const int32_t entry : entries) {
    // The sequence alone: a kernel may be reading the rest.
    if (error == cudaSuccess) error = cudaMemsetAsync(&list[entry].sequence, 0, sizeof(int64_t), stream);
  }
  // Stale first: the wait for the device does not cover kernels that come while it runs.
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  return error == cudaSuccess ? RegistryFault{} : Failed(error, "waiting for the device");
}

}  // namespace

DeviceRegistry& DeviceRegistry::Global() {
  static DeviceRegistry* const registry = new DeviceRegistry;
  return *registry;
}

std::vector<std::pair<int, DeviceRegistry::Device>> DeviceRegistry::Devices() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {devices_.begin(), devices_.end()};
}

// What the current device has, new where it has none.
RegistryFault DeviceRegistry::Make(int ordinal, Device* device) {
  for (const auto& [number, made] : Devices()) {
    if (number != ordinal) continue;
    *device = made;
    return {};
  }
  int maps = 0;
  cudaError_t error = cudaDeviceGetAttribute(&maps, cudaDevAttrCanMapHostMemory, ordinal);
  if (error != cudaSuccess) return Failed(error, "asking the device for mapped host memory");
  if (maps == 0) return {cudaSuccess, "the device cannot map host memory"};
  Device made;
  constexpr unsigned kShared = cudaHostAllocPortable | cudaHostAllocMapped;
  error = cudaStreamCreateWithFlags(&made.stream, cudaStreamNonBlocking);
  if (error == cudaSuccess) error = cudaHostAlloc(reinterpret_cast<void**>(&made.fault), sizeof(uint64_t), kShared);
  if (error == cudaSuccess) *made.fault = 0;
  if (error == cudaSuccess) error = cudaMalloc(reinterpret_cast<void**>(&made.entries), kListBytes);
  if (error == cudaSuccess) error = cudaMemsetAsync(made.entries, 0, kListBytes, made.stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(made.stream);
  if (error == cudaSuccess) {
    const std::lock_guard<std::mutex> lock(mutex_);
    *device = devices_[ordinal] = made;
    return {};
  }
  const RegistryFault fault = Failed(error, "making the device's list of addresses");
  if (made.entries != nullptr) cudaFree(made.entries);
  if (made.fault != nullptr) cudaFreeHost(made.fault);
  if (made.stream != nullptr) cudaStreamDestroy(made.stream);
  return fault;
}

RegistryFault DeviceRegistry::Add(const Address& address, const void* base, int64_t bytes,
                                  const std::vector<int>& devices) {
  const std::lock_guard<std::mutex> changes(changes_);
  if (address.entry >= kRegistryEntries) {
    return {cudaSuccess, std::to_string(kRegistryEntries) + " tables have addresses already; close some"};
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    owner_ = address.owner;
  }
  for (const int ordinal : devices) {
    const OnDevice here(ordinal);
    if (here.error() != cudaSuccess) return Failed(here.error(), "choosing the device");
    Device device;
    RegisteredMemory memory{nullptr, bytes, address.sequence};
    RegistryFault fault = Make(ordinal, &device);
    if (!fault && bytes > 0) fault = MappedAt(base, &memory.base);
    if (!fault) fault = Write(device.entries + address.entry, memory, device.stream);
    if (fault) return fault;
  }
  sequences_[address.entry] = address.sequence;
  return {};
}

RegistryFault DeviceRegistry::Remove(const std::vector<Address>& addresses) {
  const std::lock_guard<std::mutex> changes(changes_);
  std::vector<int32_t> entries;
  for (const Address& address : addresses) {
    const auto found = sequences_.find(address.entry);
    if (found == sequences_.end() || found->second != address.sequence) continue;
    entries.push_back(address.entry);
  }
  if (entries.empty()) return {};
  for (const auto& [ordinal, device] : Devices()) {
    const OnDevice here(ordinal);
    if (here.error() != cudaSuccess) return Failed(here.error(), "choosing the device");
    if (RegistryFault fault = MakeStale(device.entries, entries, device.stream)) return fault;
  }
  for (const int32_t entry : entries) sequences_.erase(entry);
  return {};
}

bool DeviceRegistry::View(RegistryView* view) {
  int ordinal = 0;
  if (cudaGetDevice(&ordinal) != cudaSuccess) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = devices_.find(ordinal);
  if (found == devices_.end()) return false;
  *view = {found->second.entries, kRegistryEntries, owner_, found->second.fault};
  return true;
}

std::string DeviceRegistry::TakeFault(const std::string& what) {
  for (const auto& [ordinal, device] : Devices()) {
    const uint64_t packed = __atomic_exchange_n(device.fault, 0, __ATOMIC_ACQ_REL);
    if (packed == 0) continue;
    const std::string column = ": columns[" + std::to_string(ColumnOf(packed)) + "] on GPU " + std::to_string(ordinal);
    return AddressFaultText(what + column, FaultOf(packed), -1, -1);
  }
  return "";
}

}  // namespace gear_jax
