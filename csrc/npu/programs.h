// SPDX-License-Identifier: Apache-2.0
// Rows -> launch program: checks every row as the CPU ops do, then tiles. Host only.
#pragma once

#include <cstdint>
#include <vector>

#include "../rows.h"
#include "tiling.h"

namespace vapd {

inline Tiling tile_gather(const std::vector<CacheView>& caches, const CacheRow* rows, int64_t count, int64_t out_bytes,
                          int64_t cores) {
  std::vector<PlacedBox> boxes;
  boxes.reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    check_row("gather", i, rows[i], caches.data(), static_cast<int64_t>(caches.size()), out_bytes, true);
    boxes.push_back({gather_box(rows[i], caches[rows[i].region]), rows[i].region, kBufferBase});
  }
  return Tiling(boxes, cores);
}

inline Tiling tile_scatter(const std::vector<CacheView>& caches, const CacheRow* rows, int64_t count,
                           int64_t buffer_bytes, int64_t cores) {
  std::vector<PlacedBox> boxes;
  boxes.reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    check_row("scatter", i, rows[i], caches.data(), static_cast<int64_t>(caches.size()), buffer_bytes, false);
    boxes.push_back({scatter_box(rows[i], caches[rows[i].region]), kBufferBase, rows[i].region});
  }
  return Tiling(boxes, cores);
}

inline Tiling tile_assemble(const BufferRow* rows, int64_t count, int64_t src_bytes, int64_t dst_bytes, int64_t cores) {
  std::vector<PlacedBox> boxes;
  boxes.reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    check_row("assemble", i, rows[i], src_bytes, dst_bytes);
    boxes.push_back({assemble_box(rows[i]), 0, kBufferBase});
  }
  return Tiling(boxes, cores);
}

}  // namespace vapd
