// SPDX-License-Identifier: Apache-2.0
// Boxes -> launch program: on the host, once per step. Plain C++, shared by the binding and the tests.
//
// 1. A box becomes a panel: rows of `width` contiguous destination bytes, on two axes.
// 2. Panels that lie side by side in each destination row (the heads of different sources, or of one source whose
//    layout is the other one) become one panel with several strips: they meet in UB and leave in one store.
// 3. Panels are cut into tiles of at most kTileBytes, and the tiles dealt to the cores by bytes, neighbours together.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "../runs.h"
#include "program.h"

namespace vapd {

// A box and the tensors it lies in.
struct PlacedBox {
  Box box;
  int64_t src_base, dst_base;
};

class Tiling {
 public:
  // `cores`: shares to divide the work into, at least 1.
  Tiling(const std::vector<PlacedBox>& boxes, int64_t cores) : cores_(cores) {
    int64_t total = 0;
    std::vector<Panel> panels;
    panels.reserve(boxes.size());
    for (const PlacedBox& placed : boxes) {
      total += placed.box.bytes();
      panels.push_back(panel_of(placed));
    }
    tile_bytes_ = tile_size(total, cores);
    std::stable_sort(panels.begin(), panels.end(), [](const Panel& a, const Panel& b) {
      return std::pair(a.dst_base, a.dst) < std::pair(b.dst_base, b.dst);
    });
    for (size_t first = 0; first < panels.size();) first = fuse_from(panels, first);
  }

  int64_t rows() const { return first_move_row(cores_) + static_cast<int64_t>(moves_.size()); }

  // `table` has room for `rows()` rows of kMoveWords words.
  void write(int64_t* table) const {
    const int64_t first_row = first_move_row(cores_);
    std::fill(table, table + first_row * kMoveWords, 0);
    table[kHeaderMagic] = kProgramMagic;
    table[kHeaderCores] = cores_;
    table[kHeaderMoves] = static_cast<int64_t>(moves_.size());
    table[kHeaderFirst] = first_row;
    table[kHeaderBytes] = bytes_;
    table[kHeaderTiles] = static_cast<int64_t>(tiles_.size());
    size_t tile = 0;
    for (int64_t core = 0; core < cores_; ++core) {
      // The share of a core begins with the first tile whose middle lies behind the shares before it.
      while (tile < tiles_.size() && (2 * tiles_[tile].before + tiles_[tile].bytes) * cores_ < 2 * bytes_ * core) {
        ++tile;
      }
      table[start_word(core)] = tile < tiles_.size() ? tiles_[tile].move : static_cast<int64_t>(moves_.size());
    }
    table[start_word(0)] = 0;
    table[start_word(cores_)] = static_cast<int64_t>(moves_.size());
    if (!moves_.empty()) std::memcpy(table + first_row * kMoveWords, moves_.data(), moves_.size() * sizeof(Move));
  }

  const std::vector<Move>& moves() const { return moves_; }

 private:
  // Bytes [at, at + width) of every row of a panel, and where they come from.
  struct Strip {
    int64_t base, src, src_outer, src_inner;
    int64_t width, at;
  };

  struct Panel {
    int64_t dst_base, dst, dst_outer, dst_inner;
    int64_t outer, inner, width;
    std::vector<Strip> strips;
  };

  struct Tile {
    int64_t move, before, bytes;
  };

  static constexpr int64_t kMinTile = 16 * 1024;  // smaller transfers waste the bus
  static constexpr int64_t kMaxStrips = 64;
  static constexpr int64_t kSector = 512;  // global memory is best touched in these

  static int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

  // As large as UB allows, but every core should get a few, so that loads and stores overlap and shares are even.
  static int64_t tile_size(int64_t total, int64_t cores) {
    return std::clamp(round_up(total / (4 * cores), kSector), kMinTile, kTileBytes);
  }

  static Panel panel_of(const PlacedBox& placed) {
    const Runs runs(placed.box);
    Panel panel{placed.dst_base, runs.dst, runs.dst_outer, runs.dst_inner, runs.outer, runs.inner, runs.width, {}};
    panel.strips.push_back(Strip{placed.src_base, runs.src, runs.src_outer, runs.src_inner, runs.width, 0});
    if (panel.inner == 1) panel.dst_inner = 0;  // strides of an axis of one say nothing
    if (panel.outer == 1) panel.dst_outer = 0;
    turn(panel);
    return panel;
  }

  // A few short runs that lie next to each other in the destination only: as strips of longer rows they are loaded
  // with `inner` copies instead of `outer`, and leave in one piece.
  static void turn(Panel& panel) {
    const bool few = panel.inner > 1 && panel.inner <= kMaxStrips && panel.inner < panel.outer;
    const bool joined = panel.dst_inner == panel.width && panel.width % kUbAlign == 0;
    if (!few || !joined || panel.inner * panel.width > kMinTile) return;
    const Strip one = panel.strips.front();
    panel.strips.clear();
    for (int64_t i = 0; i < panel.inner; ++i) {
      panel.strips.push_back(Strip{one.base, one.src + i * one.src_inner, 0, one.src_outer, one.width, i * one.width});
    }
    panel.width *= panel.inner;
    panel.inner = panel.outer;
    panel.dst_inner = panel.dst_outer;
    panel.outer = 1;
    panel.dst_outer = 0;
  }

  // Joins panels[first] with the ones that continue its rows, and cuts the result. Returns the next panel's index.
  size_t fuse_from(std::vector<Panel>& panels, size_t first) {
    Panel& whole = panels[first];
    size_t next = first + 1;
    for (; next < panels.size() && continues(whole, panels[next]); ++next) {
      for (Strip strip : panels[next].strips) {
        strip.at += whole.width;
        whole.strips.push_back(strip);
      }
      whole.width += panels[next].width;
    }
    if (whole.width > tile_bytes_) {
      cut_rows(whole);
    } else {
      cut_panel(whole);
    }
    return next;
  }

  bool continues(const Panel& whole, const Panel& panel) const {
    return whole.dst_base == panel.dst_base && whole.dst + whole.width == panel.dst && whole.outer == panel.outer &&
           whole.inner == panel.inner && whole.dst_outer == panel.dst_outer && whole.dst_inner == panel.dst_inner &&
           (whole.inner == 1 || whole.width + panel.width <= whole.dst_inner) && whole.width % kUbAlign == 0 &&
           panel.width % kUbAlign == 0 && whole.width + panel.width <= tile_bytes_ &&
           static_cast<int64_t>(whole.strips.size() + panel.strips.size()) <= kMaxStrips;
  }

  // Rows longer than a tile (they have one strip): each is cut by itself.
  void cut_rows(const Panel& panel) {
    const Strip& strip = panel.strips.front();
    for (int64_t o = 0; o < panel.outer; ++o) {
      for (int64_t i = 0; i < panel.inner; ++i) {
        const int64_t src = strip.src + o * strip.src_outer + i * strip.src_inner;
        const int64_t dst = panel.dst + o * panel.dst_outer + i * panel.dst_inner;
        for (int64_t at = 0; at < panel.width; at += tile_bytes_) {
          const int64_t length = std::min(tile_bytes_, panel.width - at);
          begin_tile(length);
          add(Move{0, strip.base, src + at, 0, 1, 0, 0, 1, length, 0, 0, 0}, MoveKind::kLoad);
          add(Move{0, panel.dst_base, dst + at, 0, 1, 0, 0, 1, length, 0, 0, 0}, MoveKind::kStore);
        }
      }
    }
  }

  // Rows that fit: as many inner rows as a tile holds, and where all of them fit, several outer ones.
  void cut_panel(const Panel& panel) {
    const int64_t pitch = round_up(panel.width, kUbAlign);
    const int64_t room = whole_sectors(panel, std::min(std::max<int64_t>(1, tile_bytes_ / pitch), kMaxBlocks));
    const int64_t inner_step = std::min(room, panel.inner);
    const int64_t outer_step = inner_step == panel.inner && steps(panel) ? std::max<int64_t>(1, room / panel.inner) : 1;
    for (int64_t o = 0; o < panel.outer; o += outer_step) {
      for (int64_t i = 0; i < panel.inner; i += inner_step) {
        cut_tile(panel, pitch, o, std::min(outer_step, panel.outer - o), i, std::min(inner_step, panel.inner - i));
      }
    }
  }

  // As many rows as keep the next tile's loads and stores at multiples of a sector, where the widths allow it.
  static int64_t whole_sectors(const Panel& panel, int64_t rows) {
    int64_t unit = kSector / std::gcd(kSector, panel.width);
    for (const Strip& strip : panel.strips) unit = std::max(unit, kSector / std::gcd(kSector, strip.width));
    return rows >= unit ? rows / unit * unit : rows;
  }

  // Whether several outer rows may share a tile: their copies loop, so each must be expressible by itself.
  static bool steps(const Panel& panel) {
    return panel.inner == 1 || (expressible(panel.dst_inner, panel.width) &&
                                std::all_of(panel.strips.begin(), panel.strips.end(), [](const Strip& strip) {
                                  return expressible(strip.src_inner, strip.width);
                                }));
  }

  void cut_tile(const Panel& panel, int64_t pitch, int64_t o, int64_t outer, int64_t i, int64_t inner) {
    begin_tile(outer * inner * panel.width);
    for (const Strip& strip : panel.strips) {
      const int64_t src = strip.src + o * strip.src_outer + i * strip.src_inner;
      add(grid(strip.base, src, strip.at, strip.width, pitch, outer, strip.src_outer, inner, strip.src_inner),
          MoveKind::kLoad);
    }
    const int64_t dst = panel.dst + o * panel.dst_outer + i * panel.dst_inner;
    add(grid(panel.dst_base, dst, 0, panel.width, pitch, outer, panel.dst_outer, inner, panel.dst_inner),
        MoveKind::kStore);
  }

  // outer x inner blocks of `width` bytes, `pitch` apart in the tile: in as few copies and blocks as possible.
  static Move grid(int64_t base, int64_t offset, int64_t ub, int64_t width, int64_t pitch, int64_t outer,
                   int64_t outer_stride, int64_t inner, int64_t inner_stride) {
    int64_t ub_outer = inner * pitch, ub_inner = pitch;
    if (inner_stride == width && ub_inner == width) {  // contiguous on both sides
      width *= inner;
      inner = 1;
    }
    if (inner == 1) {
      inner = std::exchange(outer, 1);
      inner_stride = outer_stride;
      ub_inner = ub_outer;
    } else if (outer_stride == inner * inner_stride && outer * inner <= kMaxBlocks) {
      inner *= std::exchange(outer, 1);
    }
    if (outer == 1 && inner_stride == width && ub_inner == width) {
      width *= inner;
      inner = 1;
    }
    if (inner == 1) return Move{0, base, offset, ub, outer, outer_stride, ub_outer, 1, width, 0, 0, 0};
    if (!expressible(inner_stride, width)) {
      return Move{0, base, offset, ub, inner, inner_stride, ub_inner, 1, width, 0, 0, 0};
    }
    const int64_t ub_gap = (ub_inner - round_up(width, kUbAlign)) / kUbAlign;
    return Move{0, base, offset, ub, outer, outer_stride, ub_outer, inner, width, inner_stride - width, ub_gap, 0};
  }

  // Whether one copy can step over the gap between two blocks.
  static bool expressible(int64_t stride, int64_t width) { return stride >= width && stride - width <= kMaxGap; }

  void begin_tile(int64_t bytes) {
    tiles_.push_back(Tile{static_cast<int64_t>(moves_.size()), bytes_, bytes});
    bytes_ += bytes;
    opens_ = true;
  }

  void add(Move move, MoveKind kind) {
    move.kind = static_cast<int64_t>(opens_ ? MoveKind::kLoadFirst : kind);
    opens_ = false;
    moves_.push_back(move);
  }

  int64_t cores_;
  int64_t tile_bytes_ = kTileBytes;
  int64_t bytes_ = 0;
  bool opens_ = false;
  std::vector<Move> moves_;
  std::vector<Tile> tiles_;
};

}  // namespace vapd
