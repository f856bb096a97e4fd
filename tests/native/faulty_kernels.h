// SPDX-License-Identifier: Apache-2.0
// Kernels that are wrong on purpose, each in one way that AscendC code is wrong in. The emulation must name the fault.
// "right" is their common shape without a mistake.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "kernel_operator.h"

namespace faulty {

using namespace AscendC;  // NOLINT: kernel code is written this way

constexpr uint32_t kChunk = 8192;
constexpr uint32_t kRounds = 3;

struct Tensors {
  GlobalTensor<uint8_t> in, out;
  TPipe pipe;
  TBuf<TPosition::VECCALC> buffer;
  LocalTensor<uint8_t> local;

  Tensors(uint8_t* from, uint8_t* to, uint32_t bytes = kChunk) {
    in.SetGlobalBuffer(from + GetBlockIdx() * kChunk * kRounds);
    out.SetGlobalBuffer(to + GetBlockIdx() * kChunk * kRounds);
    pipe.InitBuffer(buffer, bytes);
    local = buffer.Get<uint8_t>();
  }
};

// Loads and stores the core's part in rounds through one buffer; `stored` and `loaded` enable the events in between.
inline void copy_rounds(Tensors& t, bool loaded, bool stored, bool event_by_round = false) {
  for (uint32_t round = 0; round < kRounds; ++round) {
    if (stored && round > 0) WaitFlag<HardEvent::MTE3_MTE2>(EVENT_ID0);
    DataCopy(t.local, t.in[round * kChunk], kChunk);
    if (loaded) {
      SetFlag<HardEvent::MTE2_MTE3>(EVENT_ID0);
      WaitFlag<HardEvent::MTE2_MTE3>(EVENT_ID0);
    }
    DataCopy(t.out[round * kChunk], t.local, kChunk);
    if (stored && (event_by_round || round + 1 < kRounds)) SetFlag<HardEvent::MTE3_MTE2>(EVENT_ID0);
  }
}

using Kernel = std::function<void(uint8_t*, uint8_t*)>;

inline void reuse_event(uint8_t* in, uint8_t* out) {
  Tensors t(in, out, 2 * kChunk);
  for (uint32_t half = 0; half < 2; ++half) {
    DataCopy(t.local[half * kChunk], t.in[half * kChunk], kChunk);
    SetFlag<HardEvent::MTE2_MTE3>(EVENT_ID0);  // both halves set one event before anything waits for it
  }
  for (uint32_t half = 0; half < 2; ++half) {
    WaitFlag<HardEvent::MTE2_MTE3>(EVENT_ID0);
    DataCopy(t.out[half * kChunk], t.local[half * kChunk], kChunk);
  }
}

inline void free_twice(uint8_t* in, uint8_t*) {
  TPipe pipe;
  TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> queue;
  pipe.InitBuffer(queue, 2, kChunk);
  GlobalTensor<uint8_t> source;
  source.SetGlobalBuffer(in);
  auto tile = queue.AllocTensor<uint8_t>();
  DataCopy(tile, source, kChunk);
  queue.EnQue(tile);
  tile = queue.DeQue<uint8_t>();
  queue.FreeTensor(tile);
  queue.FreeTensor(tile);
}

inline void take_a_third_buffer(uint8_t*, uint8_t*) {
  TPipe pipe;
  TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> queue;
  pipe.InitBuffer(queue, 2, kChunk);
  for (int i = 0; i < 3; ++i) queue.AllocTensor<uint8_t>();
}

inline void read_window_early(uint8_t* in, uint8_t*) {
  TPipe pipe;
  TBuf<TPosition::VECCALC> window;
  pipe.InitBuffer(window, 512);
  GlobalTensor<int64_t> program;
  program.SetGlobalBuffer(reinterpret_cast<int64_t*>(in));
  const auto words = window.Get<int64_t>();
  DataCopy(words, program, 64);  // no MTE2_S event: the scalar unit may read before the load has ended
  words.GetValue(0);
}

inline void overwrite_window_early(uint8_t* in, uint8_t*) {
  TPipe pipe;
  TBuf<TPosition::VECCALC> window;
  pipe.InitBuffer(window, 512);
  GlobalTensor<int64_t> program;
  program.SetGlobalBuffer(reinterpret_cast<int64_t*>(in));
  const auto words = window.Get<int64_t>();
  for (int round = 0; round < 2; ++round) {
    DataCopy(words, program, 64);  // no S_MTE2 event: in the second round the words may still be in use
    SetFlag<HardEvent::MTE2_S>(EVENT_ID0);
    WaitFlag<HardEvent::MTE2_S>(EVENT_ID0);
    words.GetValue(3);
  }
}

inline const std::map<std::string, Kernel>& kernels() {
  static const std::map<std::string, Kernel> all = {
      {"right",
       [](uint8_t* in, uint8_t* out) {
         Tensors t(in, out);
         copy_rounds(t, true, true);
       }},
      {"store does not wait for its load",
       [](uint8_t* in, uint8_t* out) {
         Tensors t(in, out);
         copy_rounds(t, false, true);
       }},
      {"load does not wait for the store before it",
       [](uint8_t* in, uint8_t* out) {
         Tensors t(in, out);
         copy_rounds(t, true, false);
       }},
      {"event raised twice", reuse_event},
      {"event left set at the end",
       [](uint8_t* in, uint8_t* out) {
         Tensors t(in, out);
         copy_rounds(t, true, true, true);
       }},
      {"wait for an event that is never set",
       [](uint8_t* in, uint8_t* out) {
         Tensors t(in, out);
         WaitFlag<HardEvent::MTE2_MTE3>(EVENT_ID3);
         copy_rounds(t, true, true);
       }},
      {"more UB than there is",
       [](uint8_t* in, uint8_t* out) {
         Tensors t(in, out, 193 * 1024);
         copy_rounds(t, true, true);
       }},
      {"store of what was never loaded",
       [](uint8_t* in, uint8_t* out) {
         Tensors t(in, out);
         DataCopy(t.out, t.local, 32);
       }},
      {"copy of 33 bytes",
       [](uint8_t* in, uint8_t* out) {
         Tensors t(in, out);
         DataCopy(t.local, t.in, 33);
       }},
      {"tensor indexed past its end",
       [](uint8_t* in, uint8_t* out) {
         Tensors t(in, out);
         DataCopy(t.local[kChunk - 32], t.in, 64);
       }},
      {"buffer freed twice", free_twice},
      {"three buffers of two", take_a_third_buffer},
      {"window read before it is loaded", read_window_early},
      {"window overwritten before it is read", overwrite_window_early},
      {"cores write the same place",
       [](uint8_t* in, uint8_t* out) {
         Tensors t(in, out - GetBlockIdx() * kChunk * kRounds);
         copy_rounds(t, true, true);
       }},
  };
  return all;
}

inline emulation::Report run(const std::string& name, unsigned seed) {
  std::vector<uint8_t> in(2 * kRounds * kChunk, 7), out(in.size());
  emulation::Memory memory;
  memory.add(in.data(), in.size(), false);
  memory.add(out.data(), out.size(), true);
  const Kernel& kernel = kernels().at(name);
  emulation::Report report = emulation::launch(2, seed, memory, [&] { kernel(in.data(), out.data()); });
  if (report.fault.empty() && in != out) report.fault = "wrong data: the copy differs";
  return report;
}

}  // namespace faulty
