// SPDX-License-Identifier: Apache-2.0
// The ops on the CPU: torch's side of boxes.h. Tensors are checked here, rows there.
//
// torch's stable ABI only, so that one build serves several torch versions. Nothing is allocated but the list of caches
// that the ABI hands over.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <string>
#include <vector>

#include "boxes.h"

namespace vapd {
namespace {

using torch::stable::Tensor;

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

const auto kParallel = [](int64_t begin, int64_t end, int64_t grain, const auto& share) {
  torch::stable::parallel_for(begin, end, grain, share);
};

void gather(const std::vector<Tensor>& cache_tensors, const Tensor& rows, Tensor& out) {
  const Caches caches = caches_of("gather", cache_tensors);
  const int64_t* table = rows_of("gather", rows);
  const int64_t out_bytes = bytes_of("gather", "out", out);
  gather_boxes(kParallel, caches, reinterpret_cast<const CacheRow*>(table), rows.size(0),
               static_cast<char*>(out.mutable_data_ptr()), out_bytes);
}

void scatter(const Tensor& buffer, const Tensor& rows, const std::vector<Tensor>& cache_tensors) {
  const Caches caches = caches_of("scatter", cache_tensors);
  const int64_t* table = rows_of("scatter", rows);
  const int64_t buffer_bytes = bytes_of("scatter", "buffer", buffer);
  scatter_boxes(kParallel, static_cast<const char*>(buffer.const_data_ptr()), buffer_bytes,
                reinterpret_cast<const CacheRow*>(table), rows.size(0), caches);
}

void assemble(const Tensor& received, const Tensor& rows, Tensor& out) {
  const int64_t* table = rows_of("assemble", rows);
  const int64_t src_bytes = bytes_of("assemble", "received", received);
  const int64_t dst_bytes = bytes_of("assemble", "out", out);
  assemble_boxes(kParallel, static_cast<const char*>(received.const_data_ptr()), src_bytes,
                 reinterpret_cast<const BufferRow*>(table), rows.size(0), static_cast<char*>(out.mutable_data_ptr()),
                 dst_bytes);
}

}  // namespace
}  // namespace vapd

STABLE_TORCH_LIBRARY_IMPL(vllm_ascend_pd, CPU, m) {
  m.impl("gather", TORCH_BOX(&vapd::gather));
  m.impl("assemble", TORCH_BOX(&vapd::assemble));
  m.impl("scatter", TORCH_BOX(&vapd::scatter));
}
