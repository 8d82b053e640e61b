#include "process.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

namespace pk {
namespace {

struct Status {
  char state = 'X';  // as ps shows it: Z and X are dead
  unsigned long long started = 0;
};

// What the kernel says of a process in /proc/<pid>/stat.
Status status_of(pid_t pid) {
  Status status;
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "re"),
                                                             &std::fclose);
  if (!file) {
    if (errno != ENOENT && errno != ESRCH) status.state = '?';  // it may live
    return status;
  }
  char text[1024] = {};
  std::fread(text, 1, sizeof text - 1, file.get());
  // The second field is the program's name in parentheses, of any characters; the third is the
  // state, the twenty-second the time of start.
  const char* field = std::strrchr(text, ')');
  if (field == nullptr) return status;
  std::sscanf(field + 1,
              " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu",
              &status.state, &status.started);
  return status;
}

}  // namespace

Process::Process(pid_t pid) : pid_(pid) {
  if (pid_ == 0) return;
  fd_ = int(::syscall(SYS_pidfd_open, pid_, 0));
  if (fd_ < 0) started_ = status_of(pid_).started;  // an old kernel, or a filter of system calls
}

Process::~Process() {
  if (fd_ >= 0) ::close(fd_);
}

Process::Process(Process&& other) noexcept
    : pid_(other.pid_), fd_(other.fd_), started_(other.started_) {
  other.fd_ = -1;
}

bool Process::gone() const {
  if (pid_ == 0) return false;
  if (fd_ >= 0) {
    pollfd ended{fd_, POLLIN, 0};
    return ::poll(&ended, 1, 0) > 0;
  }
  const Status now = status_of(pid_);
  if (now.state == '?') return false;
  return now.state == 'Z' || now.state == 'X' || now.started != started_;
}

}  // namespace pk
