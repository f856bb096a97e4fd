// SPDX-License-Identifier: Apache-2.0
// A box as the fewest, longest runs of contiguous bytes.
#pragma once

#include <cstdint>
#include <utility>

#include "rows.h"

namespace vapd {

// A box with its contiguous axes merged: outer x inner runs of `width` bytes, the destination's wider stride outside.
struct Runs {
  int64_t width, outer, inner;
  int64_t src, src_outer, src_inner;
  int64_t dst, dst_outer, dst_inner;

  explicit Runs(const Box& box)
      : width(box.cell),
        outer(box.heads),
        inner(box.tokens),
        src(box.src),
        src_outer(box.src_head),
        src_inner(box.src_token),
        dst(box.dst),
        dst_outer(box.dst_head),
        dst_inner(box.dst_token) {
    if (inner > 1 && (outer == 1 || dst_outer < dst_inner)) swap_axes();
    for (int pass = 0; pass < 2; ++pass) {
      if (inner == 1 || (src_inner == width && dst_inner == width)) {
        width *= inner;
        inner = 1;
        swap_axes();
      }
    }
  }

 private:
  void swap_axes() {
    std::swap(outer, inner);
    std::swap(src_outer, src_inner);
    std::swap(dst_outer, dst_inner);
  }
};

}  // namespace vapd
