// SPDX-License-Identifier: Apache-2.0
// The kernel: carries out the moves of a launch program on one AI core.
//
// The same source is compiled by bisheng against CANN and by g++ against the emulation in tests/native.
#pragma once

#include "kernel_operator.h"
#include "program.h"

namespace vapd {

class Mover {
 public:
  __aicore__ inline Mover() {}

  // bases: kNpuRegions caches (or the receive buffer first), then the buffer; unused ones are null.
  __aicore__ inline void init(const GM_ADDR (&bases)[kBases], GM_ADDR program, AscendC::TPipe* pipe) {
    for (int64_t i = 0; i < kBases; ++i) bases_[i] = bases[i];
    program_.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t*>(program));
    pipe->InitBuffer(tiles_, 2, kTileBytes);
    pipe->InitBuffer(window_, kWindowMoves * sizeof(Move));
    loaded_ = static_cast<event_t>(pipe->FetchEventID(AscendC::HardEvent::MTE2_S));
    read_ = static_cast<event_t>(pipe->FetchEventID(AscendC::HardEvent::S_MTE2));
  }

  __aicore__ inline void run() {
    if (program_.GetValue(kHeaderMagic) != kProgramMagic) return;
    const int64_t shares = program_.GetValue(kHeaderCores);
    const int64_t first_row = program_.GetValue(kHeaderFirst);
    // As many shares as cores are planned for; with fewer cores each takes several.
    for (int64_t share = AscendC::GetBlockIdx(); share < shares; share += AscendC::GetBlockNum()) {
      const int64_t begin = program_.GetValue(start_word(share));
      const int64_t end = program_.GetValue(start_word(share + 1));
      for (int64_t at = begin; at < end; at += kWindowMoves) {
        const int64_t count = end - at < kWindowMoves ? end - at : kWindowMoves;
        fetch((first_row + at) * kMoveWords, count * kMoveWords);
        for (int64_t i = 0; i < count; ++i) carry_out(i * kMoveWords);
        // The next fetch overwrites the window: not before it has been read.
        AscendC::SetFlag<AscendC::HardEvent::S_MTE2>(read_);
        AscendC::WaitFlag<AscendC::HardEvent::S_MTE2>(read_);
      }
    }
  }

 private:
  __aicore__ inline void fetch(int64_t word, int64_t words) {
    const AscendC::LocalTensor<int64_t> window = window_.Get<int64_t>();
    AscendC::DataCopy(window, program_[word], static_cast<uint32_t>(words));
    AscendC::SetFlag<AscendC::HardEvent::MTE2_S>(loaded_);
    AscendC::WaitFlag<AscendC::HardEvent::MTE2_S>(loaded_);
  }

  __aicore__ inline Move read(int64_t at) {
    const AscendC::LocalTensor<int64_t> window = window_.Get<int64_t>();
    const uint32_t word = static_cast<uint32_t>(at);
    Move move;
    move.kind = window.GetValue(word);
    move.base = window.GetValue(word + 1);
    move.offset = window.GetValue(word + 2);
    move.ub = window.GetValue(word + 3);
    move.loops = window.GetValue(word + 4);
    move.step = window.GetValue(word + 5);
    move.ub_step = window.GetValue(word + 6);
    move.count = window.GetValue(word + 7);
    move.length = window.GetValue(word + 8);
    move.gap = window.GetValue(word + 9);
    move.ub_gap = window.GetValue(word + 10);
    return move;
  }

  __aicore__ inline void carry_out(int64_t at) {
    const Move move = read(at);
    if (move.kind == static_cast<int64_t>(MoveKind::kStore)) {
      tiles_.EnQue(tile_);
      tile_ = tiles_.DeQue<uint8_t>();
      store(move);
      tiles_.FreeTensor(tile_);
      return;
    }
    if (move.kind == static_cast<int64_t>(MoveKind::kLoadFirst)) tile_ = tiles_.AllocTensor<uint8_t>();
    load(move);
  }

  __aicore__ inline AscendC::GlobalTensor<uint8_t> global(const Move& move, int64_t loop) {
    AscendC::GlobalTensor<uint8_t> tensor;
    tensor.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(bases_[move.base]) + move.offset + loop * move.step);
    return tensor;
  }

  __aicore__ inline void load(const Move& move) {
    const AscendC::DataCopyExtParams shape{static_cast<uint16_t>(move.count), static_cast<uint32_t>(move.length),
                                           static_cast<uint32_t>(move.gap), static_cast<uint32_t>(move.ub_gap), 0};
    const AscendC::DataCopyPadExtParams<uint8_t> no_padding{false, 0, 0, 0};
    for (int64_t i = 0; i < move.loops; ++i) {
      const uint32_t ub = static_cast<uint32_t>(move.ub + i * move.ub_step);
      AscendC::DataCopyPad(tile_[ub], global(move, i), shape, no_padding);
    }
  }

  __aicore__ inline void store(const Move& move) {
    const AscendC::DataCopyExtParams shape{static_cast<uint16_t>(move.count), static_cast<uint32_t>(move.length),
                                           static_cast<uint32_t>(move.ub_gap), static_cast<uint32_t>(move.gap), 0};
    for (int64_t i = 0; i < move.loops; ++i) {
      const uint32_t ub = static_cast<uint32_t>(move.ub + i * move.ub_step);
      AscendC::DataCopyPad(global(move, i), tile_[ub], shape);
    }
  }

  GM_ADDR bases_[kBases];
  AscendC::GlobalTensor<int64_t> program_;
  AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 1> tiles_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> window_;
  AscendC::LocalTensor<uint8_t> tile_;
  event_t loaded_, read_;
};

}  // namespace vapd
