// Runs collectives in the order they were submitted, on one thread of its own, while the caller
// goes on computing. The thread starts with the first submission and sleeps when there is nothing.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "communicator.h"
#include "team.h"

namespace pk {

class Task {
 public:
  explicit Task(std::function<Result()> work) : work_(std::move(work)) {}

  void run() {
    Result result;
    std::exception_ptr error;  // no memory, or no more threads to be had
    try {
      result = work_();
    } catch (...) {
      error = std::current_exception();
    }
    work_ = nullptr;  // let go of the tensors
    const std::lock_guard lock(mutex_);
    result_ = result;
    error_ = error;
    done_ = true;
    changed_.notify_all();
  }
  bool done() const {
    const std::lock_guard lock(mutex_);
    return done_;
  }
  // Waits for the collective, which has a deadline of its own; `on_interrupt` is called once if
  // `stop` says so meanwhile, and must make the collective end.
  Result wait(const Communicator::Interrupted& stop, const std::function<void()>& on_interrupt) {
    std::unique_lock lock(mutex_);
    bool interrupted = false;
    while (!changed_.wait_for(lock, std::chrono::milliseconds(20), [&] { return done_; })) {
      lock.unlock();
      if (!interrupted && stop && stop()) {
        interrupted = true;
        on_interrupt();
      }
      lock.lock();
    }
    if (error_) std::rethrow_exception(error_);
    return result_;
  }

 private:
  std::function<Result()> work_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  Result result_;
  std::exception_ptr error_;
};

class Worker {
 public:
  ~Worker() {
    if (process_ != ::getpid()) {  // a forked child has this object, but not the thread
      new std::thread(std::move(thread_));
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
  }

  std::shared_ptr<Task> submit(std::function<Result()> work) {
    auto task = std::make_shared<Task>(std::move(work));
    const std::lock_guard lock(mutex_);
    queue_.push_back(task);
    last_ = task;
    if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
    changed_.notify_all();
    return task;
  }

  // The task submitted last, if it still runs: what a synchronous collective has to wait for.
  std::shared_ptr<Task> pending() {
    const std::lock_guard lock(mutex_);
    if (last_ && last_->done()) last_ = nullptr;
    return last_;
  }

 private:
  void serve() {
    torch_computes_here = false;
    for (;;) {
      std::shared_ptr<Task> task;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
        if (queue_.empty()) return;
        task = std::move(queue_.front());
        queue_.pop_front();
      }
      task->run();
    }
  }

  const pid_t process_ = ::getpid();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Task>> queue_;
  std::shared_ptr<Task> last_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace pk
