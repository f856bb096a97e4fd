// SPDX-License-Identifier: Apache-2.0
// Streams and events of the stand-in device: each stream is a thread that runs its tasks in order.
//
// A stand-in that executes at submission would hide a missing wait between two streams. Here it is a race, widened by
// STAND_IN_DELAY_US (every task first sleeps for a random time up to that, drawn by STAND_IN_SEED).
//
// Operators that run on the host (tests/ascend_host) need their results at once, so none of them would ever be
// unfinished. They put their externally visible writes into the stream's tail, whose tasks sleep up to
// STAND_IN_LATE_US: waiting for the stream includes its tail; without a wait one finds the old bytes.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

// In a process with Python: tasks of a stream may need the interpreter, so no thread may wait for them with its lock.
extern "C" {
int PyGILState_Check() __attribute__((weak));
void* PyEval_SaveThread() __attribute__((weak));
void PyEval_RestoreThread(void*) __attribute__((weak));
}

namespace stand_in {

// Releases the interpreter's lock while it exists, if this thread holds it.
class GilReleased {
 public:
  GilReleased() : held_(PyGILState_Check && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~GilReleased() {
    if (held_) PyEval_RestoreThread(held_);
  }
  GilReleased(const GilReleased&) = delete;

 private:
  void* const held_;
};

// A flag that is set once and can be waited for.
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
    const GilReleased released;
    std::unique_lock<std::mutex> hold(lock_);
    changed_.wait(hold, [&] { return done_; });
  }

 private:
  std::mutex lock_;
  std::condition_variable changed_;
  bool done_ = false;
};

inline int number_of(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text ? std::atoi(text) : otherwise;
}

// A thread that runs tasks in order, each after a random delay.
class Queue {
 public:
  Queue(int most_us, unsigned seed) : most_us_(most_us), random_(seed), worker_([this] { work(); }) {}

  // Queued tasks still run.
  ~Queue() {
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

  bool idle() {
    const std::lock_guard<std::mutex> hold(lock_);
    return tasks_.empty() && !busy_;
  }

 private:
  void work() {
    std::unique_lock<std::mutex> hold(lock_);
    while (true) {
      changed_.wait(hold, [&] { return closing_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
      hold.unlock();
      if (most_us_ > 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % most_us_));
      task();
      hold.lock();
      busy_ = false;
    }
  }

  const int most_us_;
  std::mt19937 random_;
  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool closing_ = false, busy_ = false;
  std::thread worker_;  // last member: it runs as soon as it exists
};

// A step of a graph: a task of a stream, or an operator of tests/ascend_host.
class Step {
 public:
  virtual ~Step() = default;
  virtual void run() = 0;
};

class Task : public Step {
 public:
  explicit Task(std::function<void()> task) : task_(std::move(task)) {}
  void run() override { task_(); }

 private:
  const std::function<void()> task_;
};

using Steps = std::vector<std::shared_ptr<Step>>;

// What was asked of streams during a capture, in the order of the calls. Each replay runs all of it on one stream. On a
// device nothing runs during a capture; here all but waits does, because operators need results for the shapes.
struct Recording {
  Steps steps;
  size_t group = 0;  // where the task group that was begun last begins
};

// A stream is destroyed once it is idle.
class Stream {
 public:
  Stream()
      : seed_(number_of("STAND_IN_SEED", 0) * 1000 + count()++), tasks_(number_of("STAND_IN_DELAY_US", 0), seed_) {}

  // The capture that this stream takes part in, and the steps of a graph to which its operators give new arguments.
  // Both are used by the thread that submits.
  std::shared_ptr<Recording> recording;
  std::deque<std::shared_ptr<Step>> updating;

  // Runs after everything submitted before, including its tail.
  void submit(std::function<void()> task) {
    if (recording) recording->steps.push_back(std::make_shared<Task>(task));
    enqueue(std::move(task));
  }

  // As submit, but during a capture the task is recorded only: it runs at each replay.
  void submit_at_replay(std::function<void()> task) {
    if (recording) {
      recording->steps.push_back(std::make_shared<Task>(std::move(task)));
    } else {
      enqueue(std::move(task));
    }
  }

  void enqueue(std::function<void()> task) {
    if (auto before = tail_end()) {
      tasks_.submit([before, task = std::move(task)] {
        before->wait();
        task();
      });
    } else {
      tasks_.submit(std::move(task));
    }
  }

  // Appends to the tail: it runs after everything submitted before, and only marks and later tasks wait for it.
  void submit_to_tail(std::function<void()> task) {
    const auto before = tasks_.mark();
    const std::lock_guard<std::mutex> hold(lock_);
    if (!tail_) tail_ = std::make_unique<Queue>(number_of("STAND_IN_LATE_US", 0), seed_ + 500);
    tail_->submit([before, task = std::move(task)] {
      before->wait();
      task();
    });
  }

  // Set when everything submitted, and its tail, has run.
  std::shared_ptr<Mark> mark() {
    auto end = tasks_.mark();
    const std::lock_guard<std::mutex> hold(lock_);
    if (!tail_) return end;
    auto late = std::make_shared<Mark>();
    tail_->submit([end = std::move(end), late] {
      end->wait();
      late->set();
    });
    return late;
  }

  void synchronize() { mark()->wait(); }

  // For an operator of this stream: everything submitted has run; the tail may not have.
  void wait_without_tail() {
    if (!tasks_.idle()) tasks_.mark()->wait();
  }

  bool idle() {
    const std::lock_guard<std::mutex> hold(lock_);
    return tasks_.idle() && (!tail_ || tail_->idle());
  }

 private:
  static std::atomic<unsigned>& count() {
    static std::atomic<unsigned> streams{0};
    return streams;
  }

  std::shared_ptr<Mark> tail_end() {
    const std::lock_guard<std::mutex> hold(lock_);
    return tail_ && !tail_->idle() ? tail_->mark() : nullptr;
  }

  const unsigned seed_;
  std::mutex lock_;
  Queue tasks_;
  std::unique_ptr<Queue> tail_;
};

// The stream behind an ACL handle; null is the device's default stream. Defined in ascendcl.cpp.
Stream& stream_of(void* handle);

// The allocation that holds `at`: its start and size, or {nullptr, 0}. Defined in ascendcl.cpp.
struct Allocation {
  char* start;
  size_t size;
};
Allocation allocation_of(const void* at);

}  // namespace stand_in
