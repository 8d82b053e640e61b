#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "../schedule.h"

namespace pk {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint32_t kVersion = 1;

// What the file says of itself. A peer follows it only when every field is as announced.
struct Title {
  char name[16];
  std::uint32_t version;
  std::uint32_t size;
  std::uint64_t slab_bytes;
  char secret[32];
};
static_assert(sizeof(Title) <= kPage);

Title title_of(const std::string& secret, int size, std::uint64_t slab_bytes) {
  Title title{};
  std::memcpy(title.name, "parallelkit", 12);
  title.version = kVersion;
  title.size = std::uint32_t(size);
  title.slab_bytes = slab_bytes;
  std::memcpy(title.secret, secret.data(), std::min(secret.size(), sizeof title.secret));
  return title;
}

std::uint64_t stride_of(std::uint64_t slab_bytes) { return round_up(slab_bytes, kPage); }

std::uint64_t file_bytes(int size, std::uint64_t slab_bytes) {
  return kPage + std::uint64_t(size) * stride_of(slab_bytes);
}

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

// Closes the descriptor unless it was handed on.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  int release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }

 private:
  int fd_;
};

}  // namespace

int Segment::create(const std::string& folder, const std::string& secret, int size,
                    std::uint64_t slab_bytes) {
  Descriptor file(folder.empty()
                      ? ::memfd_create("parallelkit", MFD_CLOEXEC)
                      : ::open(folder.c_str(), O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
  if (file.get() < 0) {
    fail(errno, folder.empty() ? "memfd_create" : "cannot make a file in " + folder);
  }
  const std::uint64_t bytes = file_bytes(size, slab_bytes);
  const Title title = title_of(secret, size, slab_bytes);
  int error = 0;
  if (::fchmod(file.get(), 0600) != 0 || ::ftruncate(file.get(), off_t(bytes)) != 0) error = errno;
  if (!error) error = ::posix_fallocate(file.get(), 0, off_t(kPage));
  if (!error && ::pwrite(file.get(), &title, sizeof title, 0) != ssize_t(sizeof title)) {
    error = errno;
  }
  if (error) fail(error, "cannot make " + std::to_string(bytes) + " bytes of shared memory");
  return file.release();
}

std::string Segment::path_of(int descriptor) {
  return "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(descriptor);
}

int Segment::open(const std::string& path, const std::string& secret, int size,
                  std::uint64_t slab_bytes) {
  Descriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (file.get() < 0) fail(errno, "cannot open " + path);
  struct stat status;
  if (::fstat(file.get(), &status) != 0) fail(errno, "cannot stat " + path);
  const Title wanted = title_of(secret, size, slab_bytes);
  Title found{};
  if (status.st_uid != ::geteuid() || (status.st_mode & 0077) != 0 ||
      std::uint64_t(status.st_size) != file_bytes(size, slab_bytes) ||
      ::pread(file.get(), &found, sizeof found, 0) != ssize_t(sizeof found) ||
      std::memcmp(&found, &wanted, sizeof found) != 0) {
    throw std::runtime_error(path + " is not the shared memory this group announced");
  }
  return file.release();
}

std::shared_ptr<Segment> Segment::map(int descriptor, int rank, int size,
                                      std::uint64_t slab_bytes) {
  const std::uint64_t stride = stride_of(slab_bytes);
  if (stride > 0) {
    const off_t begin = off_t(kPage + std::uint64_t(rank) * stride);
    if (const int error = ::posix_fallocate(descriptor, begin, off_t(stride))) {
      fail(error, "no room for " + std::to_string(stride) + " bytes of shared memory");
    }
  }
  const std::uint64_t bytes = file_bytes(size, slab_bytes);
  void* mapping = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (mapping == MAP_FAILED) {
    fail(errno, "cannot map " + std::to_string(bytes) + " bytes of shared memory");
  }
  return std::shared_ptr<Segment>(
      new Segment(static_cast<std::byte*>(mapping), bytes, kPage, rank, slab_bytes, true));
}

std::shared_ptr<Segment> Segment::local(int size, std::uint64_t slab_bytes) {
  const std::uint64_t bytes = max_u64(kPage, std::uint64_t(size) * stride_of(slab_bytes));
  void* mapping =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) fail(errno, "cannot map " + std::to_string(bytes) + " bytes");
  return std::shared_ptr<Segment>(
      new Segment(static_cast<std::byte*>(mapping), bytes, 0, 0, slab_bytes, false));
}

Segment::Segment(std::byte* mapping, std::uint64_t mapped_bytes, std::uint64_t offset, int rank,
                 std::uint64_t slab_bytes, bool shared)
    : mapping_(mapping),
      mapped_bytes_(mapped_bytes),
      base_(mapping + offset),
      stride_(std::ptrdiff_t(stride_of(slab_bytes))),
      slab_bytes_(slab_bytes),
      rank_(rank),
      shared_(shared) {}

Segment::~Segment() { ::munmap(mapping_, mapped_bytes_); }

void Segment::detach() {
  if (slab_bytes_ == 0 || !shared_) return;
  void* copy = ::mmap(nullptr, std::size_t(stride_), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (copy == MAP_FAILED) return;  // no memory left to protect it with
  std::memcpy(copy, slab(rank_), std::size_t(stride_));
  ::mremap(copy, std::size_t(stride_), std::size_t(stride_), MREMAP_MAYMOVE | MREMAP_FIXED,
           slab(rank_));
}

}  // namespace pk
