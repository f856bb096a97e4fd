// SPDX-License-Identifier: Apache-2.0
// The subset of the AscendC API that csrc/npu uses, over the machine of machine.h. Host tests only: it lets g++ compile
// the kernel's very source. Limits of the real instructions are checked where they are issued.
#pragma once

#include <string>

#include "machine.h"

#define __aicore__
#define __global__
#define __gm__
#define KERNEL_TASK_TYPE_DEFAULT(type)

using GM_ADDR = uint8_t*;
enum event_t : int { EVENT_ID0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6, EVENT_ID7 };
enum pipe_t { PIPE_S, PIPE_V, PIPE_MTE2, PIPE_MTE3, PIPE_ALL };

namespace AscendC {

enum class TPosition { GM, VECIN, VECOUT, VECCALC };
enum class HardEvent { MTE2_MTE3, MTE3_MTE2, MTE2_S, S_MTE2, MTE3_S, S_MTE3, MTE2_V, V_MTE2, V_MTE3, MTE3_V };

inline int64_t GetBlockIdx() {
  return emulation::current->index;
}
inline int64_t GetBlockNum() {
  return emulation::current->count;
}

// ---- tensors

template <typename T>
class GlobalTensor {
 public:
  void SetGlobalBuffer(T* at) { at_ = at; }
  GlobalTensor operator[](uint64_t index) const {
    GlobalTensor tensor;
    tensor.at_ = at_ + index;
    return tensor;
  }
  T GetValue(uint64_t index) const {
    emulation::current->touch_global(at_ + index, sizeof(T), false);
    return at_[index];
  }
  T* address() const { return at_; }

 private:
  T* at_ = nullptr;
};

template <typename T>
class LocalTensor {
 public:
  LocalTensor() = default;
  LocalTensor(uint64_t at, uint64_t size) : at_(at), size_(size) {}

  LocalTensor operator[](uint32_t index) const {
    const uint64_t skip = uint64_t{index} * sizeof(T);
    if (skip > size_) emulation::fault("UB out of bounds", "index " + std::to_string(index) + " of a tensor");
    return LocalTensor(at_ + skip, size_ - skip);
  }
  T GetValue(uint32_t index) const {
    const LocalTensor cell = (*this)[index];
    cell.must_hold(sizeof(T));
    emulation::current->touch_ub(emulation::kScalar, static_cast<uint32_t>(cell.at_), sizeof(T), false);
    T value;
    std::memcpy(&value, emulation::current->ub(static_cast<uint32_t>(cell.at_)), sizeof(T));
    return value;
  }

  uint64_t at() const { return at_; }
  void must_hold(uint64_t bytes) const {
    if (bytes > size_) {
      emulation::fault("UB out of bounds", std::to_string(bytes) + " bytes in a tensor of " + std::to_string(size_));
    }
  }

 private:
  uint64_t at_ = 0, size_ = 0;
};

// ---- events

namespace detail {

constexpr int source_of(HardEvent event) {
  switch (event) {
    case HardEvent::MTE2_MTE3:
    case HardEvent::MTE2_S:
    case HardEvent::MTE2_V:
      return emulation::kLoad;
    case HardEvent::MTE3_MTE2:
    case HardEvent::MTE3_S:
    case HardEvent::MTE3_V:
      return emulation::kStore;
    case HardEvent::V_MTE2:
    case HardEvent::V_MTE3:
      return emulation::kVector;
    default:
      return emulation::kScalar;
  }
}

constexpr int target_of(HardEvent event) {
  switch (event) {
    case HardEvent::MTE3_MTE2:
    case HardEvent::S_MTE2:
    case HardEvent::V_MTE2:
      return emulation::kLoad;
    case HardEvent::MTE2_MTE3:
    case HardEvent::S_MTE3:
    case HardEvent::V_MTE3:
      return emulation::kStore;
    case HardEvent::MTE2_V:
    case HardEvent::MTE3_V:
      return emulation::kVector;
    default:
      return emulation::kScalar;
  }
}

inline emulation::Event event_of(HardEvent event, int id) {
  if (id < 0 || id >= emulation::kEvents) emulation::fault("event id", std::to_string(id));
  return {source_of(event), target_of(event), id};
}

// One copy: `count` blocks of `length` bytes, the starts of blocks `global_step` and `local_step` apart.
template <typename T>
void copy(bool load, const LocalTensor<T>& local, const GlobalTensor<T>& global, uint64_t count, uint64_t length,
          uint64_t global_step, uint64_t local_step) {
  emulation::Core& core = *emulation::current;
  if (local.at() % emulation::kPiece != 0) emulation::fault("UB alignment", "address " + std::to_string(local.at()));
  if (count == 0 || length == 0) emulation::fault("copy limits", "an empty copy");
  const uint64_t padded = (length + emulation::kPiece - 1) / emulation::kPiece * emulation::kPiece;
  local.must_hold((count - 1) * local_step + (load ? padded : length));
  auto* at = reinterpret_cast<uint8_t*>(global.address());
  for (uint64_t i = 0; i < count; ++i) core.touch_global(at + i * global_step, length, !load);
  emulation::Statistics& seen = core.statistics;
  (load ? seen.loads : seen.stores) += 1;
  (load ? seen.loaded : seen.stored) += count * length;
  seen.short_copies += count * length < 16 * 1024;
  seen.unaligned += reinterpret_cast<uintptr_t>(at) % 512 != 0;
  const auto ub = static_cast<uint32_t>(local.at());
  core.issue(load ? emulation::kLoad : emulation::kStore, [=, &core] {
    for (uint64_t i = 0; i < count; ++i) {
      const auto place = static_cast<uint32_t>(ub + i * local_step);
      core.touch_ub(load ? emulation::kLoad : emulation::kStore, place, static_cast<uint32_t>(length), load);
      if (load) {
        std::memcpy(core.ub(place), at + i * global_step, length);
      } else {
        std::memcpy(at + i * global_step, core.ub(place), length);
      }
    }
  });
}

}  // namespace detail

template <HardEvent event>
void SetFlag(int id) {
  emulation::current->set(detail::event_of(event, id));
}
template <HardEvent event>
void WaitFlag(int id) {
  emulation::current->wait(detail::event_of(event, id));
}
template <pipe_t pipe>
void PipeBarrier() {
  if (pipe == PIPE_ALL) emulation::current->drain();  // each pipe runs in order without it
}

// ---- copies

struct DataCopyExtParams {
  uint16_t blockCount = 1;
  uint32_t blockLen = 0, srcStride = 0, dstStride = 0, rsv = 0;  // gaps: GM in bytes, UB in 32-byte pieces
};

template <typename T>
struct DataCopyPadExtParams {
  bool isPad = false;
  uint8_t leftPadding = 0, rightPadding = 0;
  T paddingValue{};
};

namespace detail {
inline uint64_t checked_length(const DataCopyExtParams& shape) {
  if (shape.blockCount > 4095) emulation::fault("copy limits", std::to_string(shape.blockCount) + " blocks");
  if (shape.blockLen > 2097151) emulation::fault("copy limits", std::to_string(shape.blockLen) + " bytes in a block");
  return (uint64_t{shape.blockLen} + emulation::kPiece - 1) / emulation::kPiece * emulation::kPiece;
}
}  // namespace detail

template <typename T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& shape,
                 const DataCopyPadExtParams<T>&) {
  const uint64_t padded = detail::checked_length(shape);
  detail::copy(true, dst, src, shape.blockCount, shape.blockLen, uint64_t{shape.blockLen} + shape.srcStride,
               padded + uint64_t{shape.dstStride} * emulation::kPiece);
}

template <typename T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& shape) {
  const uint64_t padded = detail::checked_length(shape);
  detail::copy(false, src, dst, shape.blockCount, shape.blockLen, uint64_t{shape.blockLen} + shape.dstStride,
               padded + uint64_t{shape.srcStride} * emulation::kPiece);
}

namespace detail {
template <typename T>
uint64_t whole_pieces(uint32_t count) {
  const uint64_t bytes = uint64_t{count} * sizeof(T);
  if (bytes % emulation::kPiece != 0) {
    emulation::fault("copy limits", "DataCopy of " + std::to_string(bytes) + " bytes, no multiple of 32");
  }
  return bytes;
}
}  // namespace detail

template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, uint32_t count) {
  detail::copy(true, dst, src, 1, detail::whole_pieces<T>(count), 0, 0);
}
template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, uint32_t count) {
  detail::copy(false, src, dst, 1, detail::whole_pieces<T>(count), 0, 0);
}

// ---- queues and buffers

class TPipe;

// A ring of buffers between a load and a store. Alloc waits until the last store out of the buffer has finished; EnQue
// signals the end of the load to the store pipe, DeQue waits for it; Free signals the end of the store to the load
// pipe.
template <TPosition from, TPosition to, int depth>
class TQueBind {
 public:
  template <typename T>
  LocalTensor<T> AllocTensor() {
    for (size_t tried = 0; tried < buffers_.size(); ++tried) {
      Buffer& buffer = buffers_[next_];
      next_ = (next_ + 1) % buffers_.size();
      if (buffer.state != State::kFree) continue;
      if (buffer.stored_pending) {
        emulation::current->wait(buffer.stored);
        forget(buffer.stored);
        buffer.stored_pending = false;
      }
      buffer.state = State::kFilling;
      return LocalTensor<T>(buffer.at, length_);
    }
    emulation::fault("queue misuse", "AllocTensor without a free buffer");
  }

  template <typename T>
  void EnQue(const LocalTensor<T>& tensor) {
    Buffer& buffer = move_on(tensor, State::kFilling, State::kQueued, "EnQue");
    if (static_cast<int>(queued_.size()) >= depth) emulation::fault("queue misuse", "EnQue beyond the queue's depth");
    emulation::current->set(buffer.loaded);
    queued_.push_back(&buffer);
  }

  template <typename T>
  LocalTensor<T> DeQue() {
    if (queued_.empty()) emulation::fault("queue misuse", "DeQue from an empty queue");
    Buffer& buffer = *queued_.front();
    queued_.pop_front();
    emulation::current->wait(buffer.loaded);
    buffer.state = State::kDraining;
    return LocalTensor<T>(buffer.at, length_);
  }

  template <typename T>
  void FreeTensor(const LocalTensor<T>& tensor) {
    Buffer& buffer = move_on(tensor, State::kDraining, State::kFree, "FreeTensor");
    emulation::current->set(buffer.stored);
    emulation::owed.push_back(buffer.stored);
    buffer.stored_pending = true;
  }

 private:
  friend class TPipe;
  enum class State { kFree, kFilling, kQueued, kDraining };

  struct Buffer {
    uint64_t at;
    emulation::Event loaded, stored;
    State state = State::kFree;
    bool stored_pending = false;
  };

  template <typename T>
  Buffer& move_on(const LocalTensor<T>& tensor, State before, State after, const char* call) {
    for (Buffer& buffer : buffers_) {
      if (buffer.at != tensor.at()) continue;
      if (buffer.state != before) emulation::fault("queue misuse", std::string(call) + " of a tensor in another state");
      buffer.state = after;
      return buffer;
    }
    emulation::fault("queue misuse", std::string(call) + " of a tensor that is not the queue's");
  }

  static void forget(const emulation::Event& event) {
    auto& owed = emulation::owed;
    owed.erase(std::find_if(owed.begin(), owed.end(), [&](const auto& e) { return !(e < event) && !(event < e); }));
  }

  std::deque<Buffer> buffers_;
  std::deque<Buffer*> queued_;
  uint64_t length_ = 0;
  size_t next_ = 0;
};

template <TPosition position>
class TBuf {
 public:
  template <typename T>
  LocalTensor<T> Get() const {
    return LocalTensor<T>(at_, length_);
  }

 private:
  friend class TPipe;
  uint64_t at_ = 0, length_ = 0;
};

class TPipe {
 public:
  template <TPosition from, TPosition to, int depth>
  bool InitBuffer(TQueBind<from, to, depth>& queue, uint8_t count, uint32_t length) {
    queue.length_ = (length + emulation::kPiece - 1) / emulation::kPiece * emulation::kPiece;
    emulation::Core& core = *emulation::current;
    for (int i = 0; i < count; ++i) {
      const emulation::Event loaded{emulation::kLoad, emulation::kStore,
                                    core.next_event(emulation::kLoad, emulation::kStore, true)};
      const emulation::Event stored{emulation::kStore, emulation::kLoad,
                                    core.next_event(emulation::kStore, emulation::kLoad, true)};
      queue.buffers_.push_back({core.reserve(length), loaded, stored});
    }
    return true;
  }

  template <TPosition position>
  bool InitBuffer(TBuf<position>& buffer, uint32_t length) {
    buffer.at_ = emulation::current->reserve(length);
    buffer.length_ = (length + emulation::kPiece - 1) / emulation::kPiece * emulation::kPiece;
    return true;
  }

  int FetchEventID(HardEvent event) const {
    return emulation::current->next_event(detail::source_of(event), detail::target_of(event), false);
  }
};

}  // namespace AscendC
