// Another process of this machine, watched for its end.
#pragma once

#include <sys/types.h>

namespace pk {

class Process {
 public:
  // `pid` 0: none, which never ends.
  explicit Process(pid_t pid);
  ~Process();
  Process(Process&& other) noexcept;
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  // Whether it has ended, its parent having asked for its status or not; another process that got
  // its number since is not it.
  bool gone() const;

 private:
  pid_t pid_;
  int fd_ = -1;                     // a pidfd, where the kernel gives one
  unsigned long long started_ = 0;  // else its time of start, from /proc
};

}  // namespace pk
