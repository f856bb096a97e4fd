// SPDX-License-Identifier: Apache-2.0
// Streams and events of the stand-in device: each stream is a thread that runs its tasks in order.
//
// Unlike a stand-in that executes at submission, a forgotten wait between two streams shows here: as a race, made wide
// by STAND_IN_DELAY_US (every task first sleeps for a random time up to that).
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

namespace stand_in {

// Something that becomes true once.
class Mark {
 public:
  void set() {
    const std::lock_guard<std::mutex> hold(lock_);
    done_ = true;
    changed_.notify_all();
  }
  bool done() {
    const std::lock_guard<std::mutex> hold(lock_);
    return done_;
  }
  void wait() {
    std::unique_lock<std::mutex> hold(lock_);
    changed_.wait(hold, [&] { return done_; });
  }

 private:
  std::mutex lock_;
  std::condition_variable changed_;
  bool done_ = false;
};

class Stream {
 public:
  Stream() : worker_([this] { work(); }) {}

  // The tasks that are queued still run; a stream is destroyed once it is idle.
  ~Stream() {
    {
      const std::lock_guard<std::mutex> hold(lock_);
      closing_ = true;
      changed_.notify_all();
    }
    worker_.join();
  }

  void submit(std::function<void()> task) {
    const std::lock_guard<std::mutex> hold(lock_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }

  std::shared_ptr<Mark> mark() {
    auto mark = std::make_shared<Mark>();
    submit([mark] { mark->set(); });
    return mark;
  }

  void synchronize() { mark()->wait(); }

  bool idle() {
    const std::lock_guard<std::mutex> hold(lock_);
    return tasks_.empty() && !busy_;
  }

 private:
  void work() {
    const char* text = std::getenv("STAND_IN_DELAY_US");
    const int most = text ? std::atoi(text) : 0;
    std::mt19937 random(static_cast<unsigned>(reinterpret_cast<uintptr_t>(this) >> 4));
    std::unique_lock<std::mutex> hold(lock_);
    while (true) {
      changed_.wait(hold, [&] { return closing_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
      hold.unlock();
      if (most > 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % most));
      task();
      hold.lock();
      busy_ = false;
    }
  }

  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool closing_ = false, busy_ = false;
  std::thread worker_;  // last: it runs as soon as it exists
};

// The stream behind an ACL handle; null is the device's own. Defined in ascendcl.cpp.
Stream& stream_of(void* handle);

// The allocation that holds `at`: its start and size, or {nullptr, 0}. Defined in ascendcl.cpp.
struct Allocation {
  char* start;
  size_t size;
};
Allocation allocation_of(const void* at);

}  // namespace stand_in
