#include "memory.h"

#include <cuda.h>

#include <cstring>
#include <utility>

#include "launch.h"

namespace pk {
namespace {

void check_driver(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  throw std::runtime_error(std::string(call) + ": CUDA driver error " + std::to_string(result));
}

// A function of the driver by its name, as of the version that its type is of.
template <class Function>
void look_up(Function*& function, const char* name, unsigned version) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  check(cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result), name);
  if (!found || result != cudaDriverEntryPointSuccess) {
    throw std::runtime_error(std::string(name) + ": this driver does not have it");
  }
  function = reinterpret_cast<Function*>(found);
}

// The driver's functions; throws where there is no driver, or one without virtual memory.
struct Driver {
  decltype(cuDeviceGetAttribute)* device_attribute;
  decltype(cuMemGetAllocationGranularity)* granularity;
  decltype(cuMemCreate)* create;
  decltype(cuMemRelease)* release;
  decltype(cuMemExportToShareableHandle)* export_handle;
  decltype(cuMemImportFromShareableHandle)* import_handle;
  decltype(cuMemAddressReserve)* reserve;
  decltype(cuMemAddressFree)* free;
  decltype(cuMemMap)* map;
  decltype(cuMemUnmap)* unmap;
  decltype(cuMemSetAccess)* set_access;

  Driver() {
    look_up(device_attribute, "cuDeviceGetAttribute", 2000);
    look_up(granularity, "cuMemGetAllocationGranularity", 10020);
    look_up(create, "cuMemCreate", 10020);
    look_up(release, "cuMemRelease", 10020);
    look_up(export_handle, "cuMemExportToShareableHandle", 10020);
    look_up(import_handle, "cuMemImportFromShareableHandle", 10020);
    look_up(reserve, "cuMemAddressReserve", 10020);
    look_up(free, "cuMemAddressFree", 10020);
    look_up(map, "cuMemMap", 10020);
    look_up(unmap, "cuMemUnmap", 10020);
    look_up(set_access, "cuMemSetAccess", 10020);
  }
};

const Driver& driver() {
  static const Driver found;
  return found;
}

CUmemAllocationProp properties(int device) {
  CUmemAllocationProp wanted{};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  wanted.location.id = device;
  return wanted;
}

std::uint64_t granularity(int device) {
  const CUmemAllocationProp wanted = properties(device);
  std::size_t bytes = 0;
  check_driver(driver().granularity(&bytes, &wanted, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
               "cuMemGetAllocationGranularity");
  return bytes;
}

void clear(void* address, std::uint64_t bytes) {
  check(cudaMemset(address, 0, bytes), "cudaMemset");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

bool attribute(int device, CUdevice_attribute which) {
  int value = 0;
  return driver().device_attribute(&value, which, device) == CUDA_SUCCESS && value != 0;
}

}  // namespace

std::shared_ptr<Memory> Memory::plain(int device, std::uint64_t bytes) {
  const OnDevice guard(device);
  void* address = nullptr;
  check(cudaMalloc(&address, bytes), "cudaMalloc");
  std::shared_ptr<Memory> made(
      new Memory(device, reinterpret_cast<std::uintptr_t>(address), bytes));
  made->release_ = [address] { cudaFree(address); };
  clear(address, bytes);
  return made;
}

// Map memory of the driver, whichever device it is on, for `device`. Takes the handle over.
std::shared_ptr<Memory> Memory::map(int device, std::uint64_t handle, std::uint64_t bytes) {
  const Driver& d = driver();
  std::shared_ptr<Memory> made(new Memory(device, 0, bytes));
  made->handle_ = handle;
  made->release_ = [&d, handle] { d.release(handle); };
  CUdeviceptr address = 0;
  check_driver(d.reserve(&address, bytes, granularity(device), 0, 0), "cuMemAddressReserve");
  made->release_ = [&d, handle, address, bytes] {
    d.free(address, bytes);
    d.release(handle);
  };
  check_driver(d.map(address, bytes, 0, handle, 0), "cuMemMap");
  made->release_ = [&d, handle, address, bytes] {
    d.unmap(address, bytes);
    d.free(address, bytes);
    d.release(handle);
  };
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  check_driver(d.set_access(address, bytes, &access, 1), "cuMemSetAccess");
  made->address_ = std::uintptr_t(address);
  return made;
}

std::shared_ptr<Memory> Memory::shareable(int device, std::uint64_t bytes) {
  const OnDevice guard(device);
  check(cudaFree(nullptr), "cudaFree");  // makes the context that the driver's functions want
  const CUmemAllocationProp wanted = properties(device);
  const std::uint64_t unit = granularity(device), rounded = (bytes + unit - 1) / unit * unit;
  CUmemGenericAllocationHandle handle = 0;
  check_driver(driver().create(&handle, rounded, &wanted, 0), "cuMemCreate");
  const auto made = map(device, handle, rounded);
  clear(reinterpret_cast<void*>(made->address_), rounded);
  return made;
}

std::shared_ptr<Memory> Memory::open_fd(int device, int descriptor, std::uint64_t bytes) {
  const OnDevice guard(device);
  check(cudaFree(nullptr), "cudaFree");
  const std::uint64_t unit = granularity(device), rounded = (bytes + unit - 1) / unit * unit;
  CUmemGenericAllocationHandle handle = 0;
  check_driver(driver().import_handle(&handle, reinterpret_cast<void*>(std::intptr_t(descriptor)),
                                      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
               "cuMemImportFromShareableHandle");
  return map(device, handle, rounded);
}

std::shared_ptr<Memory> Memory::open_ipc(int device, const std::string& handle,
                                         std::uint64_t bytes) {
  cudaIpcMemHandle_t opaque;
  if (handle.size() != sizeof opaque) {
    throw std::invalid_argument("Memory.open_ipc: handle must have " +
                                std::to_string(sizeof opaque) + " bytes, got " +
                                std::to_string(handle.size()));
  }
  std::memcpy(&opaque, handle.data(), sizeof opaque);
  const OnDevice guard(device);
  void* address = nullptr;
  check(cudaIpcOpenMemHandle(&address, opaque, cudaIpcMemLazyEnablePeerAccess),
        "cudaIpcOpenMemHandle");
  std::shared_ptr<Memory> made(
      new Memory(device, reinterpret_cast<std::uintptr_t>(address), bytes));
  made->release_ = [address] { cudaIpcCloseMemHandle(address); };
  return made;
}

std::string Memory::ipc_handle() const {
  const OnDevice guard(device_);
  cudaIpcMemHandle_t opaque;
  check(cudaIpcGetMemHandle(&opaque, reinterpret_cast<void*>(address_)), "cudaIpcGetMemHandle");
  return std::string(opaque.reserved, sizeof opaque);
}

int Memory::export_fd() const {
  if (handle_ == 0) {
    throw std::invalid_argument("Memory.export_fd: only Memory.shareable can be exported so");
  }
  int descriptor = -1;
  check_driver(
      driver().export_handle(&descriptor, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
      "cuMemExportToShareableHandle");
  return descriptor;
}

void Memory::close() {
  if (const auto release = std::exchange(release_, nullptr)) release();
}

bool exports_descriptors(int device) {
  return attribute(device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
}

bool has_multicast(int device) {
  return attribute(device, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED);
}

}  // namespace pk
