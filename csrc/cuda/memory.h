// Device memory that other ranks can reach: of cudaMalloc, which cudaIpc exports, or of the
// driver's virtual memory, which a file descriptor exports. The driver's functions are looked up
// when they are first needed, so that the module loads where there is no driver.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace pk {

class Memory {
 public:
  static std::shared_ptr<Memory> plain(int device, std::uint64_t bytes);
  static std::shared_ptr<Memory> shareable(int device, std::uint64_t bytes);
  static std::shared_ptr<Memory> open_ipc(int device, const std::string& handle,
                                          std::uint64_t bytes);
  static std::shared_ptr<Memory> open_fd(int device, int descriptor, std::uint64_t bytes);
  ~Memory() { close(); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::string ipc_handle() const;
  int export_fd() const;
  void close();
  std::uintptr_t address() const { return address_; }
  std::uint64_t bytes() const { return bytes_; }

 private:
  Memory(int device, std::uintptr_t address, std::uint64_t bytes) noexcept
      : device_(device), address_(address), bytes_(bytes) {}
  static std::shared_ptr<Memory> map(int device, std::uint64_t handle, std::uint64_t bytes);

  int device_;
  std::uintptr_t address_;
  std::uint64_t bytes_;
  std::uint64_t handle_ = 0;       // of the driver's memory
  std::function<void()> release_;  // null once closed
};

// Whether the driver can export memory of this device as a file descriptor, and multicast to it.
bool exports_descriptors(int device);
bool has_multicast(int device);

}  // namespace pk
