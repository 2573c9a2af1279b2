#include "ffi/transport/ucx_api.h"

#include <dlfcn.h>

#include <mutex>

namespace gear_jax::transport {
namespace {

constexpr char kLibrary[] = "libucp.so.0";
constexpr unsigned kMajor = 1, kMinor = 22;  // the oldest that the error handling here was tried with

std::string Open(UcxApi* api) {
  // The package libucx loads its own copies first; then this name finds them.
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (library == nullptr) library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    return std::string("libucp.so.0: got ") + (why == nullptr ? "no reason" : why) +
           ", wanted a library that loads. Run `pip install 'libucx-cu12>=1.22'`.";
  }
  // Never closed: UCX has threads and hooks of its own.
#define GEAR_JAX_UCX_FIND(name)                                                                                        \
  api->name = reinterpret_cast<decltype(api->name)>(dlsym(library, #name));                                            \
  if (api->name == nullptr) {                                                                                          \
    return "libucp.so.0: got one without " #name ", wanted UCX 1.22 or newer. Run `pip install 'libucx-cu12>=1.22'`."; \
  }
  GEAR_JAX_UCX_FUNCTIONS(GEAR_JAX_UCX_FIND)
#undef GEAR_JAX_UCX_FIND
  api->ucp_get_version(&api->major, &api->minor, &api->release);
  if (api->major != kMajor || api->minor < kMinor) {
    return "libucp.so.0: got UCX " + std::to_string(api->major) + "." + std::to_string(api->minor) +
           ", wanted 1.22 or newer. Run `pip install 'libucx-cu12>=1.22'`, and unset "
           "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY.";
  }
  return "";
}

}  // namespace

const UcxApi* UcxApi::Load(std::string* error) {
  static std::mutex mutex;
  static UcxApi* loaded = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if (loaded == nullptr) {
    UcxApi api;
    *error = Open(&api);
    if (!error->empty()) return nullptr;  // tried again: the package may be loaded later
    loaded = new UcxApi(api);
  }
  return loaded;
}

}  // namespace gear_jax::transport
