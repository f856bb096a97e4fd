// SPDX-License-Identifier: Apache-2.0
// The ops on the CPU: every row is checked first, then the threads share the payload by bytes.
//
// torch's stable ABI only, so that one build serves several torch versions. No allocation on the way but the list of
// caches that the ABI hands over.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <string>
#include <vector>

#include "../rows.h"
#include "copy.h"

namespace vapd {
namespace {

using torch::stable::Tensor;

constexpr int64_t kMaxRegions = 8;
// Threads take the payload in pages, and none is woken for less than a grain.
constexpr int64_t kPage = 4096;
constexpr int64_t kGrainPages = 32;

[[noreturn]] void fail(const char* op, const std::string& why) {
  throw RowError(std::string(op) + ": " + why);
}

void must_be_cpu(const char* op, const char* name, const Tensor& tensor) {
  if (!tensor.is_cpu()) fail(op, std::string(name) + " is not on the CPU");
}

const int64_t* rows_of(const char* op, const Tensor& rows) {
  must_be_cpu(op, "rows", rows);
  if (rows.scalar_type() != torch::headeronly::ScalarType::Long) fail(op, "rows must be int64");
  if (rows.dim() != 2 || rows.size(1) != kColumns) {
    std::string shape;
    for (int64_t i = 0; i < rows.dim(); ++i) shape += (i ? ", " : "") + std::to_string(rows.size(i));
    fail(op, "rows has shape [" + shape + "], but it must be [n, " + std::to_string(kColumns) + "]");
  }
  if (!rows.is_contiguous()) fail(op, "rows must be contiguous");
  return static_cast<const int64_t*>(rows.const_data_ptr());
}

int64_t bytes_of(const char* op, const char* name, const Tensor& buffer) {
  must_be_cpu(op, name, buffer);
  if (!buffer.is_contiguous()) fail(op, std::string(name) + " must be contiguous");
  return buffer.numel() * static_cast<int64_t>(buffer.element_size());
}

CacheView view_of(const char* op, size_t region, const Tensor& cache) {
  const std::string name = "caches[" + std::to_string(region) + "]";
  must_be_cpu(op, name.c_str(), cache);
  if (cache.dim() != 4) {
    fail(op, name + " has " + std::to_string(cache.dim()) + " dimensions, but it must be [block, head, token, cell]");
  }
  if (cache.size(3) > 1 && cache.stride(3) != 1) {
    fail(op, name + ": the last stride is " + std::to_string(cache.stride(3)) + ", but a cell must be contiguous");
  }
  const int64_t item = cache.element_size();
  return CacheView{cache.size(0),          cache.size(1),          cache.size(2),         cache.size(3) * item,
                   cache.stride(0) * item, cache.stride(1) * item, cache.stride(2) * item};
}

struct Caches {
  std::array<CacheView, kMaxRegions> views;
  std::array<char*, kMaxRegions> bases;
  int64_t count;
};

Caches caches_of(const char* op, const std::vector<Tensor>& tensors) {
  Caches caches{};
  caches.count = static_cast<int64_t>(tensors.size());
  if (tensors.empty() || caches.count > kMaxRegions) {
    fail(op, std::to_string(caches.count) + " caches, but there must be 1 to " + std::to_string(kMaxRegions));
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    caches.views[i] = view_of(op, i, tensors[i]);
    caches.bases[i] = static_cast<char*>(tensors[i].data_ptr());
    check_view(op, static_cast<int64_t>(i), caches.views[i]);
  }
  return caches;
}

// Runs `copy(row, from, to)` over all rows, each thread over its share of the payload.
// `bytes(row)` is cheap: every thread walks the table to find where its share begins.
template <typename Bytes, typename Copy>
void share_payload(int64_t rows, int64_t total, Bytes bytes, Copy copy) {
  const int64_t pages = (total + kPage - 1) / kPage;
  torch::stable::parallel_for(0, pages, kGrainPages, [&](int64_t first_page, int64_t end_page) {
    const int64_t lo = first_page * kPage;
    const int64_t hi = end_page * kPage < total ? end_page * kPage : total;
    int64_t at = 0;
    for (int64_t row = 0; row < rows && at < hi; ++row) {
      const int64_t size = bytes(row);
      if (at + size > lo) copy(row, lo > at ? lo - at : 0, hi - at < size ? hi - at : size);
      at += size;
    }
    stream_fence();
  });
}

void gather(const std::vector<Tensor>& cache_tensors, const Tensor& rows_tensor, Tensor& out) {
  const char* op = "gather";
  const Caches caches = caches_of(op, cache_tensors);
  const auto* rows = reinterpret_cast<const CacheRow*>(rows_of(op, rows_tensor));
  const int64_t count = rows_tensor.size(0);
  const int64_t out_bytes = bytes_of(op, "out", out);
  const auto bytes = [&](int64_t i) { return rows[i].heads * rows[i].tokens * caches.views[rows[i].region].cell; };
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    check_row(op, i, rows[i], caches.views.data(), caches.count, out_bytes, true);
    total += bytes(i);
  }
  auto* base = static_cast<char*>(out.mutable_data_ptr());
  share_payload(count, total, bytes, [&](int64_t i, int64_t from, int64_t to) {
    const int64_t region = rows[i].region;
    copy_share(gather_box(rows[i], caches.views[region]), caches.bases[region], base, from, to);
  });
}

void scatter(const Tensor& buffer, const Tensor& rows_tensor, const std::vector<Tensor>& cache_tensors) {
  const char* op = "scatter";
  const Caches caches = caches_of(op, cache_tensors);
  const auto* rows = reinterpret_cast<const CacheRow*>(rows_of(op, rows_tensor));
  const int64_t count = rows_tensor.size(0);
  const int64_t buffer_bytes = bytes_of(op, "buffer", buffer);
  const auto bytes = [&](int64_t i) { return rows[i].heads * rows[i].tokens * caches.views[rows[i].region].cell; };
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    check_row(op, i, rows[i], caches.views.data(), caches.count, buffer_bytes, false);
    total += bytes(i);
  }
  const auto* base = static_cast<const char*>(buffer.const_data_ptr());
  share_payload(count, total, bytes, [&](int64_t i, int64_t from, int64_t to) {
    const int64_t region = rows[i].region;
    copy_share(scatter_box(rows[i], caches.views[region]), base, caches.bases[region], from, to);
  });
}

void assemble(const Tensor& received, const Tensor& rows_tensor, Tensor& out) {
  const char* op = "assemble";
  const auto* rows = reinterpret_cast<const BufferRow*>(rows_of(op, rows_tensor));
  const int64_t count = rows_tensor.size(0);
  const int64_t src_bytes = bytes_of(op, "received", received);
  const int64_t dst_bytes = bytes_of(op, "out", out);
  const auto bytes = [&](int64_t i) { return rows[i].heads * rows[i].tokens * rows[i].cell; };
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    check_row(op, i, rows[i], src_bytes, dst_bytes);
    total += bytes(i);
  }
  const auto* src = static_cast<const char*>(received.const_data_ptr());
  auto* dst = static_cast<char*>(out.mutable_data_ptr());
  share_payload(count, total, bytes,
                [&](int64_t i, int64_t from, int64_t to) { copy_share(assemble_box(rows[i]), src, dst, from, to); });
}

}  // namespace
}  // namespace vapd

STABLE_TORCH_LIBRARY_IMPL(vllm_ascend_pd, CPU, m) {
  m.impl("gather", TORCH_BOX(&vapd::gather));
  m.impl("assemble", TORCH_BOX(&vapd::assemble));
  m.impl("scatter", TORCH_BOX(&vapd::scatter));
}
