// SPDX-License-Identifier: Apache-2.0
// One AI core as far as data movement goes: unified buffer (UB), in-order pipes, events, and access checks.
//
// Instructions are queued on their pipe at issue and run later, in a random order that only events constrain: a missing
// event shows as a race (vector clocks over 32-byte pieces of UB) under some seed, and usually as wrong data too.
// Cores share nothing but global memory (GM), so they run one after the other; what each touched is compared at the
// end. Every fault has a name that tests ask for.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace emulation {

constexpr uint32_t kUbBytes = 192 * 1024;
constexpr uint32_t kPiece = 32;
constexpr uint32_t kMaxBuffers = 64;
constexpr int kEvents = 8;

enum Pipe { kScalar, kVector, kLoad, kStore, kPipes };
inline const char* name_of(int pipe) {
  static const char* const names[] = {"S", "V", "MTE2", "MTE3"};
  return names[pipe];
}

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void fault(const std::string& name, const std::string& detail) {
  throw Fault(name + ": " + detail);
}

// ---- global memory

// The memory of the kernel's arguments. Everything else is out of bounds.
class Memory {
 public:
  void add(const void* at, uint64_t size, bool writable) {
    const auto lo = reinterpret_cast<uintptr_t>(at);
    ranges_.push_back({lo, lo + size, writable});
  }

  void check(const void* at, uint64_t size, bool write) const {
    const auto lo = reinterpret_cast<uintptr_t>(at);
    for (const Range& range : ranges_) {
      if (range.lo <= lo && size <= range.hi - range.lo && lo - range.lo <= range.hi - range.lo - size) {
        if (write && !range.writable) fault("GM write to read-only memory", std::to_string(size) + " bytes");
        return;
      }
    }
    fault(write ? "GM write out of bounds" : "GM read out of bounds", describe(lo, size));
  }

 private:
  struct Range {
    uintptr_t lo, hi;
    bool writable;
  };

  std::string describe(uintptr_t lo, uint64_t size) const {
    std::string text = std::to_string(size) + " bytes";
    for (const Range& range : ranges_) {
      const auto from = static_cast<int64_t>(lo - range.lo);
      text += ", at " + std::to_string(from) + " of " + std::to_string(range.hi - range.lo);
    }
    return text;
  }

  std::vector<Range> ranges_;
};

struct Touch {
  uintptr_t lo, hi;
  int core;
  bool write;
};

// Faults if two cores meet in one byte that at least one writes, or one core writes a byte twice.
inline void check_overlap(std::vector<Touch> touches) {
  std::sort(touches.begin(), touches.end(), [](const Touch& a, const Touch& b) { return a.lo < b.lo; });
  const Touch* write = nullptr;  // the write seen so far that reaches furthest
  const Touch* reads[2] = {};    // the same for reads, of two different cores
  for (const Touch& touch : touches) {
    const auto meets = [&](const Touch* other) { return other && other->hi > touch.lo; };
    const auto pair = [&](const Touch* other) {
      return "cores " + std::to_string(other->core) + " and " + std::to_string(touch.core);
    };
    if (meets(write) && write->core != touch.core) {
      fault("GM overlap between cores", pair(write) + (touch.write ? " write one byte" : " write and read one byte"));
    }
    if (meets(write) && touch.write) fault("GM written twice", "by core " + std::to_string(touch.core));
    for (const Touch* read : reads) {
      if (touch.write && meets(read) && read->core != touch.core) {
        fault("GM overlap between cores", pair(read) + " read and write one byte");
      }
    }
    if (touch.write) {
      if (!write || touch.hi > write->hi) write = &touch;
    } else if (!reads[0] || reads[0]->core == touch.core) {
      if (!reads[0] || touch.hi > reads[0]->hi) reads[0] = &touch;
    } else if (!reads[1] || touch.hi > reads[1]->hi) {
      reads[1] = &touch;
      if (reads[1]->hi > reads[0]->hi) std::swap(reads[0], reads[1]);
    }
  }
}

struct Statistics {
  uint64_t loads = 0, stores = 0, loaded = 0, stored = 0;  // copies and bytes
  uint64_t short_copies = 0;                               // below 16 KiB
  uint64_t unaligned = 0;                                  // begin at a GM address that is no multiple of 512
  uint64_t ub_peak = 0;
  std::vector<uint64_t> bytes_by_core;

  void add(const Statistics& other) {
    loads += other.loads;
    stores += other.stores;
    loaded += other.loaded;
    stored += other.stored;
    short_copies += other.short_copies;
    unaligned += other.unaligned;
    ub_peak = std::max(ub_peak, other.ub_peak);
    bytes_by_core.push_back(other.stored);
  }
};

// ---- one core

struct Event {
  int from, to, id;
  bool operator<(const Event& other) const {
    return std::array{from, to, id} < std::array{other.from, other.to, other.id};
  }
};

inline std::string describe(const Event& event) {
  return std::string(name_of(event.from)) + "_" + name_of(event.to) + " " + std::to_string(event.id);
}

// Contents of UB and accesses to it, in pieces of 32 bytes. One for all cores of a launch: they run one after another,
// and fresh memory costs more than clearing it.
struct UnifiedBuffer {
  struct Piece {
    int writer = kScalar;
    uint64_t written = 0;
    std::array<uint64_t, kPipes> read{};
  };

  UnifiedBuffer& cleared() {
    bytes.assign(kUbBytes, 0xCD);
    written.assign(kUbBytes, 0);
    pieces.assign(kUbBytes / kPiece, Piece{});
    return *this;
  }

  std::vector<uint8_t> bytes, written;
  std::vector<Piece> pieces;
};

class Core {
 public:
  using Clock = std::array<uint64_t, kPipes>;

  Core(int index, int count, unsigned seed, const Memory& memory, UnifiedBuffer& buffer)
      : index(index),
        count(count),
        memory_(memory),
        random_(seed * 7919u + index),
        mood_(seed % 4),
        ub_(buffer.bytes),
        written_(buffer.written),
        pieces_(buffer.pieces) {}

  const int index, count;
  Statistics statistics;
  std::vector<Touch> touches;

  // -- UB is allocated in order and never freed
  uint32_t reserve(uint64_t size) {
    const uint64_t rounded = (size + kPiece - 1) / kPiece * kPiece;
    if (top_ + rounded > kUbBytes) {
      fault("UB capacity", std::to_string(top_ + rounded) + " of " + std::to_string(kUbBytes) + " bytes");
    }
    if (++buffers_ > kMaxBuffers) fault("UB capacity", "more than " + std::to_string(kMaxBuffers) + " buffers");
    const uint32_t at = top_;
    top_ += static_cast<uint32_t>(rounded);
    statistics.ub_peak = top_;
    return at;
  }

  uint8_t* ub(uint32_t at) { return ub_.data() + at; }

  // -- accesses
  void touch_global(const void* at, uint64_t size, bool write) {
    memory_.check(at, size, write);
    const auto lo = reinterpret_cast<uintptr_t>(at);
    if (!touches.empty() && touches.back().hi == lo && touches.back().write == write) {
      touches.back().hi += size;
    } else {
      touches.push_back({lo, lo + size, index, write});
    }
  }

  // A pipe reads or writes [at, at + size) of UB, now.
  void touch_ub(int pipe, uint32_t at, uint32_t size, bool write) {
    if (at > kUbBytes || size > kUbBytes - at)
      fault("UB out of bounds", std::to_string(at) + " + " + std::to_string(size));
    const uint64_t now = ++clocks_[pipe][pipe];
    for (uint32_t piece = at / kPiece; piece < (at + size + kPiece - 1) / kPiece; ++piece) {
      Piece& last = pieces_[piece];
      ordered(pipe, last.writer, last.written, write, piece);
      if (write) {
        for (int other = 0; other < kPipes; ++other) ordered(pipe, other, last.read[other], write, piece);
        last.writer = pipe;
        last.written = now;
      } else {
        last.read[pipe] = now;
      }
    }
    if (write) {
      // A load fills whole pieces: bytes behind its last one are not data.
      const uint32_t end = (at + size + kPiece - 1) / kPiece * kPiece;
      std::fill(written_.begin() + at, written_.begin() + at + size, 1);
      std::fill(written_.begin() + at + size, written_.begin() + end, 0);
      std::fill(ub_.begin() + at + size, ub_.begin() + end, 0xCD);
    } else if (std::find(written_.begin() + at, written_.begin() + at + size, 0) != written_.begin() + at + size) {
      fault("UB uninitialised", "read of " + std::to_string(size) + " bytes at " + std::to_string(at));
    }
  }

  // -- instructions and events
  void issue(int pipe, std::function<void()> work) { enqueue(pipe, {std::move(work), {}, Kind::kWork}); }

  void set(const Event& event) {
    // In the program's order sets and waits alternate, however the pipes run.
    if (!pending_.insert(event).second) fault("event reused", describe(event) + " is set again before anyone waits");
    if (event.from == kScalar) return raise(event);
    enqueue(event.from, {{}, event, Kind::kSet});
  }

  void wait(const Event& event) {
    pending_.erase(event);
    if (event.to != kScalar) return enqueue(event.to, {{}, event, Kind::kWait});
    while (!is_set(event)) {
      if (!step()) fault("event never set", describe(event));
    }
    lower(event);
  }

  // Runs until all pipes are empty, like a barrier over all pipes.
  void drain() {
    while (step()) {
    }
    for (const auto& queue : queues_) {
      if (!queue.empty()) fault("event never set", describe(queue.front().event));
    }
    Clock all{};
    for (const Clock& clock : clocks_) merge(all, clock);
    clocks_.fill(all);
  }

  // The end of the kernel. `owed`: events that the queues' own implementation still waits for.
  void finish(const std::vector<Event>& owed) {
    drain();
    for (const Event& event : owed) lower(event);
    for (const auto& [event, clock] : events_) fault("event left set", describe(event));
  }

  int next_event(int from, int to, bool take) {
    int& next = next_event_[{from, to, 0}];
    if (next >= kEvents) fault("out of events", describe({from, to, next}));
    return take ? next++ : next;
  }

 private:
  enum class Kind { kWork, kSet, kWait };

  struct Instruction {
    std::function<void()> work;
    Event event;
    Kind kind;
  };

  using Piece = UnifiedBuffer::Piece;

  void ordered(int pipe, int other, uint64_t tick, bool write, uint32_t piece) const {
    if (other != pipe && tick > clocks_[pipe][other]) {
      fault("UB race", std::string(name_of(pipe)) + (write ? " writes" : " reads") + " what " + name_of(other) +
                           " has touched, without an event, at " + std::to_string(piece * kPiece));
    }
  }

  static void merge(Clock& into, const Clock& from) {
    for (int i = 0; i < kPipes; ++i) into[i] = std::max(into[i], from[i]);
  }

  bool is_set(const Event& event) const { return events_.count(event) != 0; }

  void raise(const Event& event) {
    if (is_set(event)) fault("event reused", describe(event) + " is still set");
    events_[event] = clocks_[event.from];
  }

  void lower(const Event& event) {
    merge(clocks_[event.to], events_.at(event));
    events_.erase(event);
  }

  void enqueue(int pipe, Instruction instruction) {
    queues_[pipe].push_back(std::move(instruction));
    // Scheduling by seed: at once, as late as possible, or now and then.
    const unsigned steps = mood_ == 0 ? 64 : mood_ == 1 ? 0 : random_() % (mood_ == 2 ? 3 : 8) / 2;
    for (unsigned i = 0; i < steps && step(); ++i) {
    }
  }

  // Runs the next instruction of a random pipe that can continue. False: none can.
  bool step() {
    std::array<int, kPipes> ready{};
    size_t choices = 0;
    for (int pipe = 0; pipe < kPipes; ++pipe) {
      if (queues_[pipe].empty()) continue;
      const Instruction& next = queues_[pipe].front();
      if (next.kind != Kind::kWait || is_set(next.event)) ready[choices++] = pipe;
    }
    if (choices == 0) return false;
    auto& queue = queues_[ready[random_() % choices]];
    const Instruction next = std::move(queue.front());
    queue.pop_front();
    if (next.kind == Kind::kWork) next.work();
    if (next.kind == Kind::kSet) raise(next.event);
    if (next.kind == Kind::kWait) lower(next.event);
    return true;
  }

  const Memory& memory_;
  std::mt19937 random_;
  const unsigned mood_;
  std::vector<uint8_t>&ub_, &written_;
  std::vector<Piece>& pieces_;
  std::array<std::deque<Instruction>, kPipes> queues_;
  std::array<Clock, kPipes> clocks_{};
  std::map<Event, Clock> events_;
  std::set<Event> pending_;
  std::map<Event, int> next_event_;
  uint32_t top_ = 0, buffers_ = 0;
};

// ---- a launch

inline thread_local Core* current = nullptr;
inline thread_local std::vector<Event> owed;

struct Report {
  std::string fault;  // empty if there is none
  Statistics statistics;
};

inline Report launch(int cores, unsigned seed, const Memory& memory, const std::function<void()>& kernel) {
  Report report;
  std::vector<Touch> touches;
  static thread_local UnifiedBuffer buffer;
  try {
    for (int index = 0; index < cores; ++index) {
      Core core(index, cores, seed, memory, buffer.cleared());
      current = &core;
      owed.clear();
      try {
        kernel();
        core.finish(owed);
      } catch (const Fault& found) {
        throw Fault(std::string(found.what()) + " (core " + std::to_string(index) + ")");
      }
      report.statistics.add(core.statistics);
      touches.insert(touches.end(), core.touches.begin(), core.touches.end());
    }
    check_overlap(std::move(touches));
  } catch (const Fault& found) {
    report.fault = found.what();
  }
  current = nullptr;
  return report;
}

}  // namespace emulation
