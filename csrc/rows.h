// SPDX-License-Identifier: Apache-2.0
// What a row of work means, and the check that it stays inside its tensors.
//
// The three ops copy *boxes*: `heads` x `tokens` cells, each cell contiguous, each axis with its own stride on either
// side. A table of such rows is planned once per step and serves every layer, because a row holds no address: a cache
// row names region, block, head and token; a buffer is addressed by byte offsets. All of it is 64-bit.
// Plain C++ without torch: the CPU ops, the NPU binding, the tiling and the native tests share this file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace vapd {

// A paged cache seen as cells: [block, head, token] -> `cell` contiguous bytes. Strides in bytes.
// K‖V packed is one region with a cell of both; an opaque plane is a region with one token; MLA has one head.
struct CacheView {
  int64_t blocks, heads, tokens, cell;
  int64_t block_stride, head_stride, token_stride;
};

// gather and scatter: cache <-> buffer. The cell's size comes from the region.
struct CacheRow {
  int64_t region, block, head, token, heads, tokens;
  int64_t offset, head_stride, token_stride;  // in the buffer, bytes
};

// assemble: buffer -> buffer, all in bytes.
struct BufferRow {
  int64_t cell, heads, tokens;
  int64_t src, src_head_stride, src_token_stride;
  int64_t dst, dst_head_stride, dst_token_stride;
};

constexpr int64_t kColumns = 9;
static_assert(sizeof(CacheRow) == kColumns * sizeof(int64_t) && sizeof(BufferRow) == sizeof(CacheRow),
              "a row is nine 64-bit integers, as Python writes them");

// A row resolved to byte offsets from the two base addresses.
struct Box {
  int64_t cell, heads, tokens;
  int64_t src, src_head, src_token;
  int64_t dst, dst_head, dst_token;

  int64_t bytes() const { return cell * heads * tokens; }
};

class RowError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// "gather: rows[3]: block = 17, but it must be in [0, 12)": every message names the row, the field and its value.
class RowCheck {
 public:
  RowCheck(const char* op, int64_t row) : op_(op), row_(row) {}

  void in_range(const char* field, int64_t value, int64_t low, int64_t end) const {
    if (value < low || value >= end) {
      fail(named(field, value) + ", but it must be in [" + std::to_string(low) + ", " + std::to_string(end) + ")");
    }
  }

  void at_least(const char* field, int64_t value, int64_t low) const {
    if (value < low) fail(named(field, value) + ", but it must be at least " + std::to_string(low));
  }

  // start + count <= size, without overflow
  void slice(const char* start_name, int64_t start, const char* count_name, int64_t count, int64_t size) const {
    at_least(start_name, start, 0);
    at_least(count_name, count, 1);
    if (count > size || start > size - count) {
      fail(named(start_name, start) + ", " + named(count_name, count) + ", but there are only " + std::to_string(size));
    }
  }

  // The box [heads, tokens, cell] at `offset` must end within `size` bytes.
  void box(const char* side, int64_t offset, int64_t heads, int64_t head_stride, int64_t tokens, int64_t token_stride,
           int64_t cell, int64_t size) const {
    if (offset < 0) fail(std::string(side) + " " + named("offset", offset) + ", but it must be at least 0");
    if (head_stride < 0) fail(std::string(side) + " " + named("head_stride", head_stride) + " is negative");
    if (token_stride < 0) fail(std::string(side) + " " + named("token_stride", token_stride) + " is negative");
    bool fits = cell <= size && offset <= size - cell;
    int64_t room = fits ? size - cell - offset : 0;
    for (const auto& axis : {Axis{heads, head_stride}, Axis{tokens, token_stride}}) {
      if (!fits || axis.count == 1 || axis.stride == 0) continue;
      fits = axis.count - 1 <= room / axis.stride;
      if (fits) room -= (axis.count - 1) * axis.stride;
    }
    if (!fits) {
      fail(std::string(side) + " " + named("offset", offset) + ", " + named("heads", heads) + " x " +
           named("head_stride", head_stride) + ", " + named("tokens", tokens) + " x " +
           named("token_stride", token_stride) + ", " + named("cell", cell) + " ends past the " + std::to_string(size) +
           " bytes there are");
    }
  }

  // Two cells of one destination box must not overlap: the threads write them in any order.
  void disjoint(const char* side, int64_t heads, int64_t head_stride, int64_t tokens, int64_t token_stride,
                int64_t cell) const {
    const bool heads_inside = heads == 1 || head_stride >= cell;
    const bool tokens_inside = tokens == 1 || token_stride >= cell;
    const bool nested = heads == 1 || tokens == 1 || (tokens - 1) * token_stride + cell <= head_stride ||
                        (heads - 1) * head_stride + cell <= token_stride;
    if (!heads_inside || !tokens_inside || !nested) {
      fail(std::string(side) + " " + named("head_stride", head_stride) + ", " + named("token_stride", token_stride) +
           " make cells of " + std::to_string(cell) + " bytes overlap (" + named("heads", heads) + ", " +
           named("tokens", tokens) + ")");
    }
  }

 private:
  struct Axis {
    int64_t count, stride;
  };

  static std::string named(const char* field, int64_t value) {
    return std::string(field) + " = " + std::to_string(value);
  }

  [[noreturn]] void fail(const std::string& why) const {
    throw RowError(std::string(op_) + ": rows[" + std::to_string(row_) + "]: " + why);
  }

  const char* op_;
  int64_t row_;
};

inline int64_t cache_offset(const CacheRow& row, const CacheView& cache) {
  return row.block * cache.block_stride + row.head * cache.head_stride + row.token * cache.token_stride;
}

inline Box gather_box(const CacheRow& row, const CacheView& cache) {
  return Box{cache.cell,         row.heads,  row.tokens,      cache_offset(row, cache), cache.head_stride,
             cache.token_stride, row.offset, row.head_stride, row.token_stride};
}

inline Box scatter_box(const CacheRow& row, const CacheView& cache) {
  return Box{cache.cell,
             row.heads,
             row.tokens,
             row.offset,
             row.head_stride,
             row.token_stride,
             cache_offset(row, cache),
             cache.head_stride,
             cache.token_stride};
}

inline Box assemble_box(const BufferRow& row) {
  return Box{row.cell, row.heads,           row.tokens,          row.src, row.src_head_stride, row.src_token_stride,
             row.dst,  row.dst_head_stride, row.dst_token_stride};
}

// Checks a cache row against its cache and the buffer's size.
// `into_buffer`: gather writes the buffer, scatter writes the cache (whose cells the view keeps apart).
inline void check_row(const char* op, int64_t index, const CacheRow& row, const CacheView* caches, int64_t regions,
                      int64_t buffer_bytes, bool into_buffer) {
  const RowCheck check(op, index);
  check.in_range("region", row.region, 0, regions);
  const CacheView& cache = caches[row.region];
  check.in_range("block", row.block, 0, cache.blocks);
  check.slice("head", row.head, "heads", row.heads, cache.heads);
  check.slice("token", row.token, "tokens", row.tokens, cache.tokens);
  check.box("buffer", row.offset, row.heads, row.head_stride, row.tokens, row.token_stride, cache.cell, buffer_bytes);
  if (into_buffer) {
    check.disjoint("buffer", row.heads, row.head_stride, row.tokens, row.token_stride, cache.cell);
  }
}

inline void check_row(const char* op, int64_t index, const BufferRow& row, int64_t src_bytes, int64_t dst_bytes) {
  const RowCheck check(op, index);
  check.at_least("cell", row.cell, 1);
  check.at_least("heads", row.heads, 1);
  check.at_least("tokens", row.tokens, 1);
  check.box("source", row.src, row.heads, row.src_head_stride, row.tokens, row.src_token_stride, row.cell, src_bytes);
  check.box("destination", row.dst, row.heads, row.dst_head_stride, row.tokens, row.dst_token_stride, row.cell,
            dst_bytes);
  check.disjoint("destination", row.heads, row.dst_head_stride, row.tokens, row.dst_token_stride, row.cell);
}

// The cache a scatter writes must keep its cells apart, else two rows that name different cells would collide.
inline void check_view(const char* op, int64_t region, const CacheView& cache) {
  const auto fail = [&](const char* field, int64_t value, const std::string& why) {
    throw RowError(std::string(op) + ": caches[" + std::to_string(region) + "]: " + field + " = " +
                   std::to_string(value) + ", but " + why);
  };
  const std::string cell = "a cell holds " + std::to_string(cache.cell) + " bytes: cells overlap";
  if (cache.cell < 1) fail("cell", cache.cell, "a cell must hold at least one byte");
  if (cache.blocks > 1 && cache.block_stride < cache.cell) fail("block stride", cache.block_stride, cell);
  if (cache.heads > 1 && cache.head_stride < cache.cell) fail("head stride", cache.head_stride, cell);
  if (cache.tokens > 1 && cache.token_stride < cache.cell) fail("token stride", cache.token_stride, cell);
}

}  // namespace vapd
