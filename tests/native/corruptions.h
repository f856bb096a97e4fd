// SPDX-License-Identifier: Apache-2.0
// Faults planted into a launch program: what a mistake in the tiling would produce. The kernel itself is unchanged.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "npu/program.h"

namespace native {

// The moves of a program, to be corrupted.
struct Moves {
  explicit Moves(std::vector<int64_t>& program)
      : first(reinterpret_cast<vapd::Move*>(program.data() + program[vapd::kHeaderFirst] * vapd::kMoveWords)),
        count(program[vapd::kHeaderMoves]) {}

  vapd::Move& last(vapd::MoveKind kind) const {
    for (int64_t i = count - 1; i >= 0; --i) {
      if (first[i].kind == static_cast<int64_t>(kind)) return first[i];
    }
    throw std::runtime_error("the program has no such move");
  }
  vapd::Move& with_blocks(vapd::MoveKind kind) const {
    for (int64_t i = 0; i < count; ++i) {
      if (first[i].kind == static_cast<int64_t>(kind) && first[i].count > 1) return first[i];
    }
    throw std::runtime_error("the program has no move of several blocks");
  }

  // Index of the first move of the tile after the one that begins at `at`.
  int64_t next_tile(int64_t at) const {
    do ++at;
    while (at < count && first[at].kind != static_cast<int64_t>(vapd::MoveKind::kLoadFirst));
    return at;
  }
  void repeat_first_tile(int64_t at) const {
    const int64_t length = next_tile(0);
    if (at == 0 || next_tile(at) - at != length) throw std::runtime_error("the tiles are not alike");
    std::copy(first, first + length, first + at);
  }

  vapd::Move* first;
  int64_t count;
};

inline void corrupt(const std::string& fault, std::vector<int64_t>& program) {
  using vapd::MoveKind;
  const Moves moves(program);
  const std::map<std::string, std::function<void()>> known = {
      {"none", [] {}},
      {"tail stored short", [&] { moves.last(MoveKind::kStore).length -= 32; }},
      {"tail stored long", [&] { moves.last(MoveKind::kStore).length += 32; }},
      {"tail loaded short", [&] { moves.last(MoveKind::kLoadFirst).length -= 32; }},
      {"read past the end", [&] { moves.last(MoveKind::kLoadFirst).offset += int64_t{1} << 24; }},
      {"read before the start", [&] { moves.first[0].offset = -64; }},
      {"write past the end", [&] { moves.last(MoveKind::kStore).offset += int64_t{1} << 24; }},
      {"write to what is only read", [&] { moves.with_blocks(MoveKind::kStore).base = 0; }},
      {"unaligned UB address", [&] { moves.first[0].ub += 16; }},
      {"tile longer than its buffer",
       [&] {
         moves.first[0].length = vapd::kTileBytes + 512;
         moves.first[0].count = moves.first[0].loops = 1;
       }},
      {"wrong stride of a load", [&] { moves.with_blocks(MoveKind::kLoadFirst).gap += 32; }},
      {"wrong stride of a store", [&] { moves.with_blocks(MoveKind::kStore).gap -= 32; }},
      {"wrong stride in UB", [&] { moves.with_blocks(MoveKind::kLoadFirst).ub_gap += 1; }},
      {"strip forgotten", [&] { moves.last(MoveKind::kLoad).loops = 0; }},
      {"too many blocks", [&] { moves.with_blocks(MoveKind::kLoadFirst).count = 4096; }},
      {"two cores share a tile", [&] { moves.repeat_first_tile(program[vapd::start_word(1)]); }},
      {"tile done twice", [&] { moves.repeat_first_tile(moves.next_tile(0)); }},
      {"offset cut to 32 bits",
       [&] {
         for (int64_t i = 0; i < moves.count; ++i) moves.first[i].offset &= 0xffffffff;
       }},
      {"count cut to 16 bits", [&] { moves.with_blocks(MoveKind::kStore).count += 65536 - 1; }},
  };
  known.at(fault)();
}

}  // namespace native
