// SPDX-License-Identifier: Apache-2.0
// Rows -> launch program for the NPU: host work, once per step, so it is an op of the CPU library and needs no NPU.
//
// `views` holds the seven numbers of a CacheView for each region. Each op returns how many rows of 12 words the program
// takes and writes it if `program` has room; so a caller asks once with a guess and again if it was short.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <string>
#include <vector>

#include "../npu/programs.h"
#include "../tensors.h"

namespace vapd {
namespace {

using torch::stable::Tensor;

constexpr int64_t kViewWords = sizeof(CacheView) / sizeof(int64_t);
constexpr int64_t kMaxCores = 1024;

void check_host_table(const char* op, const Tensor& table, int64_t columns) {
  if (!table.is_cpu()) refuse(op, "a table is not on the CPU");
  check_table(op, table, table.scalar_type() == torch::headeronly::ScalarType::Long, columns);
}

std::vector<CacheView> views_of(const char* op, const std::vector<int64_t>& words) {
  if (words.size() % kViewWords != 0) refuse(op, std::to_string(words.size()) + " numbers are no list of views");
  std::vector<CacheView> views;
  for (size_t at = 0; at < words.size(); at += kViewWords) {
    views.push_back(
        {words[at], words[at + 1], words[at + 2], words[at + 3], words[at + 4], words[at + 5], words[at + 6]});
    check_view(op, static_cast<int64_t>(views.size()) - 1, views.back());
  }
  check_regions(op, static_cast<int64_t>(views.size()), kNpuRegions);
  return views;
}

int64_t checked_cores(const char* op, int64_t cores) {
  if (cores < 1 || cores > kMaxCores) {
    refuse(op, "cores = " + std::to_string(cores) + ", but it must be in [1, " + std::to_string(kMaxCores) + "]");
  }
  return cores;
}

int64_t written(const char* op, const Tiling& tiling, Tensor& program) {
  check_host_table(op, program, kMoveWords);
  if (tiling.rows() <= program.size(0)) tiling.write(static_cast<int64_t*>(program.mutable_data_ptr()));
  return tiling.rows();
}

int64_t tile_gather_rows(const std::vector<int64_t>& views, const Tensor& rows, int64_t out_bytes, int64_t cores,
                         Tensor& program) {
  check_host_table("gather", rows, kColumns);
  const auto* table = static_cast<const CacheRow*>(rows.const_data_ptr());
  return written("gather",
                 tile_gather(views_of("gather", views), table, rows.size(0), out_bytes, checked_cores("gather", cores)),
                 program);
}

int64_t tile_scatter_rows(const std::vector<int64_t>& views, const Tensor& rows, int64_t buffer_bytes, int64_t cores,
                          Tensor& program) {
  check_host_table("scatter", rows, kColumns);
  const auto* table = static_cast<const CacheRow*>(rows.const_data_ptr());
  return written(
      "scatter",
      tile_scatter(views_of("scatter", views), table, rows.size(0), buffer_bytes, checked_cores("scatter", cores)),
      program);
}

int64_t tile_assemble_rows(const Tensor& rows, int64_t received_bytes, int64_t out_bytes, int64_t cores,
                           Tensor& program) {
  check_host_table("assemble", rows, kColumns);
  const auto* table = static_cast<const BufferRow*>(rows.const_data_ptr());
  return written("assemble",
                 tile_assemble(table, rows.size(0), received_bytes, out_bytes, checked_cores("assemble", cores)),
                 program);
}

}  // namespace
}  // namespace vapd

STABLE_TORCH_LIBRARY_IMPL(vllm_ascend_pd, CPU, m) {
  m.impl("tile_gather", TORCH_BOX(&vapd::tile_gather_rows));
  m.impl("tile_scatter", TORCH_BOX(&vapd::tile_scatter_rows));
  m.impl("tile_assemble", TORCH_BOX(&vapd::tile_assemble_rows));
}
