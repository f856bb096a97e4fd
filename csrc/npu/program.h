// SPDX-License-Identifier: Apache-2.0
// The launch program: what the host's tiling decides and the AI cores carry out.
//
// A program is an int64 table [rows, 12] in device memory: one header row, rows with each core's first move, then the
// moves. A *tile* is a series of loads into one UB buffer and one store out of it; its moves are neighbours. No
// decision is left to the kernel, so one kernel serves all ops, and what runs is what the tests have seen.
// Included by the kernel: no standard library but <cstdint>.
#pragma once

#include <cstdint>

namespace vapd {

constexpr int64_t kProgramMagic = 0x3150445041564b56;  // changes with the format
constexpr int64_t kMoveWords = 12;

// 910B: 192 KiB of UB. Two tile buffers, so that one is loaded while the other is stored, and a window of moves.
constexpr int64_t kUbBytes = 192 * 1024;
constexpr int64_t kTileBytes = 90 * 1024;
constexpr int64_t kWindowMoves = 64;
constexpr int64_t kUbAlign = 32;
static_assert(2 * kTileBytes + kWindowMoves * kMoveWords * 8 <= kUbBytes, "UB of one core");
static_assert(kTileBytes % 512 == 0, "tiles keep global memory aligned");

// Limits of one DataCopyPad.
constexpr int64_t kMaxBlocks = 4095;
constexpr int64_t kMaxBlockBytes = 2097151;
constexpr int64_t kMaxGap = 0xffffffff;

constexpr int64_t kNpuRegions = 8;
constexpr int64_t kBufferBase = kNpuRegions;  // bases 0..7 are caches (or the receive buffer), 8 the other buffer
constexpr int64_t kBases = kNpuRegions + 1;

enum class MoveKind : int64_t { kLoadFirst = 0, kLoad = 1, kStore = 2 };

// `loops` copies, each of `count` blocks of `length` bytes between global memory and UB.
struct Move {
  int64_t kind;
  int64_t base;     // which global tensor
  int64_t offset;   // in it, bytes
  int64_t ub;       // in the tile, bytes
  int64_t loops;    // copies of the shape below
  int64_t step;     // from one copy to the next in global memory
  int64_t ub_step;  // and in the tile
  int64_t count;    // blocks of one copy
  int64_t length;   // bytes of a block
  int64_t gap;      // end of a block to the start of the next, global memory, bytes
  int64_t ub_gap;   // the same in the tile, in units of 32 bytes
  int64_t reserved;
};
static_assert(sizeof(Move) == kMoveWords * sizeof(int64_t), "a move is one row of the program");

// Words of the header row.
constexpr int64_t kHeaderMagic = 0;
constexpr int64_t kHeaderCores = 1;  // shares the moves are divided into
constexpr int64_t kHeaderMoves = 2;  // number of moves
constexpr int64_t kHeaderFirst = 3;  // row of the first move
constexpr int64_t kHeaderBytes = 4;  // payload
constexpr int64_t kHeaderTiles = 5;

// Word of the program that holds the first move of share `core`; share `core` ends where the next one begins.
constexpr int64_t start_word(int64_t core) {
  return kMoveWords + core;
}
constexpr int64_t first_move_row(int64_t cores) {
  return 1 + (cores + 1 + kMoveWords - 1) / kMoveWords;
}

}  // namespace vapd
