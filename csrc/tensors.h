// SPDX-License-Identifier: Apache-2.0
// Tensors -> plain facts, with every refusal in words. Written once for torch's stable tensors (the CPU ops) and for
// ATen's (the NPU binding): both have the same accessors.
#pragma once

#include <cstdint>
#include <string>

#include "rows.h"

namespace vapd {

[[noreturn]] inline void refuse(const char* op, const std::string& why) {
  throw RowError(std::string(op) + ": " + why);
}

template <typename Tensor>
std::string shape_of(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t i = 0; i < tensor.dim(); ++i) text += (i ? ", " : "") + std::to_string(tensor.size(i));
  return text + "]";
}

// `is_int64` is asked by the caller: the two kinds of tensors name their types differently.
template <typename Tensor>
void check_table(const char* op, const Tensor& rows, bool is_int64, int64_t columns) {
  if (!is_int64) refuse(op, "rows must be int64");
  if (rows.dim() != 2 || rows.size(1) != columns) {
    refuse(op, "rows has shape " + shape_of(rows) + ", but it must be [n, " + std::to_string(columns) + "]");
  }
  if (!rows.is_contiguous()) refuse(op, "rows must be contiguous");
}

template <typename Tensor>
int64_t bytes_of(const char* op, const char* name, const Tensor& buffer) {
  if (!buffer.is_contiguous()) refuse(op, std::string(name) + " must be contiguous");
  return buffer.numel() * static_cast<int64_t>(buffer.element_size());
}

inline void check_regions(const char* op, int64_t regions, int64_t most) {
  if (regions < 1 || regions > most) {
    refuse(op, std::to_string(regions) + " caches, but there must be 1 to " + std::to_string(most));
  }
}

template <typename Tensor>
CacheView view_of(const char* op, int64_t region, const Tensor& cache) {
  const std::string name = "caches[" + std::to_string(region) + "]";
  if (cache.dim() != 4) {
    refuse(op, name + " has " + std::to_string(cache.dim()) + " dimensions, but it must be [block, head, token, cell]");
  }
  if (cache.size(3) > 1 && cache.stride(3) != 1) {
    refuse(op, name + ": the last stride is " + std::to_string(cache.stride(3)) + ", but a cell must be contiguous");
  }
  const int64_t item = cache.element_size();
  const CacheView view{cache.size(0),          cache.size(1),          cache.size(2),         cache.size(3) * item,
                       cache.stride(0) * item, cache.stride(1) * item, cache.stride(2) * item};
  check_view(op, region, view);
  return view;
}

}  // namespace vapd
