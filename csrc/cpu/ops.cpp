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

#include "../tensors.h"
#include "boxes.h"

namespace vapd {
namespace {

using torch::stable::Tensor;

void must_be_cpu(const char* op, const char* name, const Tensor& tensor) {
  if (!tensor.is_cpu()) refuse(op, std::string(name) + " is not on the CPU");
}

template <typename Row>
const Row* rows_of(const char* op, const Tensor& rows) {
  must_be_cpu(op, "rows", rows);
  check_table(op, rows, rows.scalar_type() == torch::headeronly::ScalarType::Long, kColumns);
  return static_cast<const Row*>(rows.const_data_ptr());
}

int64_t size_of(const char* op, const char* name, const Tensor& buffer) {
  must_be_cpu(op, name, buffer);
  return bytes_of(op, name, buffer);
}

Caches caches_of(const char* op, const std::vector<Tensor>& tensors) {
  Caches caches{};
  caches.count = static_cast<int64_t>(tensors.size());
  check_regions(op, caches.count, kMaxRegions);
  for (int64_t i = 0; i < caches.count; ++i) {
    must_be_cpu(op, "a cache", tensors[i]);
    caches.views[i] = view_of(op, i, tensors[i]);
    caches.bases[i] = static_cast<char*>(tensors[i].data_ptr());
  }
  return caches;
}

const auto kParallel = [](int64_t begin, int64_t end, int64_t grain, const auto& share) {
  torch::stable::parallel_for(begin, end, grain, share);
};

void gather(const std::vector<Tensor>& cache_tensors, const Tensor& rows, Tensor& out) {
  const Caches caches = caches_of("gather", cache_tensors);
  const auto* table = rows_of<CacheRow>("gather", rows);
  const int64_t out_bytes = size_of("gather", "out", out);
  gather_boxes(kParallel, caches, table, rows.size(0), static_cast<char*>(out.mutable_data_ptr()), out_bytes);
}

void scatter(const Tensor& buffer, const Tensor& rows, const std::vector<Tensor>& cache_tensors) {
  const Caches caches = caches_of("scatter", cache_tensors);
  const auto* table = rows_of<CacheRow>("scatter", rows);
  const int64_t buffer_bytes = size_of("scatter", "buffer", buffer);
  scatter_boxes(kParallel, static_cast<const char*>(buffer.const_data_ptr()), buffer_bytes, table, rows.size(0),
                caches);
}

void assemble(const Tensor& received, const Tensor& rows, Tensor& out) {
  const auto* table = rows_of<BufferRow>("assemble", rows);
  const int64_t src_bytes = size_of("assemble", "received", received);
  const int64_t dst_bytes = size_of("assemble", "out", out);
  assemble_boxes(kParallel, static_cast<const char*>(received.const_data_ptr()), src_bytes, table, rows.size(0),
                 static_cast<char*>(out.mutable_data_ptr()), dst_bytes);
}

}  // namespace
}  // namespace vapd

STABLE_TORCH_LIBRARY_IMPL(vllm_ascend_pd, CPU, m) {
  m.impl("gather", TORCH_BOX(&vapd::gather));
  m.impl("assemble", TORCH_BOX(&vapd::assemble));
  m.impl("scatter", TORCH_BOX(&vapd::scatter));
}
