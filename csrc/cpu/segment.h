// Memory that every rank of a host maps: one file, a slab for each rank.
//
//     [ title page | slab of rank 0 | slab of rank 1 | ... ]
//
// The file never has a name: it is a memfd or, where a folder is asked for, an unnamed file there,
// of mode 0600. Peers reach it through /proc/<pid>/fd, and the kernel frees it with its last
// mapping, whatever happens to the processes: there is nothing to clean up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace pk {

class Segment {
 public:
  // Rank 0: make the file and its title page, in `folder` or (empty) as a memfd. The descriptor is
  // the caller's to close once the others have opened path_of(descriptor).
  static int create(const std::string& folder, const std::string& secret, int size,
                    std::uint64_t slab_bytes);
  static std::string path_of(int descriptor);
  // The others: open what rank 0 made. Throws when it is not ours or not what was announced.
  static int open(const std::string& path, const std::string& secret, int size,
                  std::uint64_t slab_bytes);
  // Everybody: claim the pages of the own slab (out of memory shows here, as an exception, not as
  // SIGBUS in the middle of a copy) and map all slabs.
  static std::shared_ptr<Segment> map(int descriptor, int rank, int size, std::uint64_t slab_bytes);
  // The same shape of memory for ranks that are threads of one process; one object for all.
  static std::shared_ptr<Segment> local(int size, std::uint64_t slab_bytes);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* slab(int rank) const { return base_ + rank * stride_; }
  std::uint64_t slab_bytes() const { return slab_bytes_; }
  std::ptrdiff_t stride() const { return stride_; }

  // Replace the own slab by a private copy, so that a peer that wakes up late cannot write to it.
  // Ranks in one process have one fate, and nothing to protect.
  void detach();

 private:
  Segment(std::byte* mapping, std::uint64_t mapped_bytes, std::uint64_t offset, int rank,
          std::uint64_t slab_bytes, bool shared);

  std::byte* mapping_;
  std::uint64_t mapped_bytes_;
  std::byte* base_;
  std::ptrdiff_t stride_;
  std::uint64_t slab_bytes_;
  int rank_;
  bool shared_;
};

}  // namespace pk
