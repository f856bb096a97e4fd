// SPDX-License-Identifier: Apache-2.0
// The ops on the NPU: the schema of schema.cpp bound for PrivateUse1, launched through torch_npu's OpCommand.
//
// `rows` may be a table of rows in host memory, as on the CPU: it is checked, tiled and copied to the device on the
// way, which waits. Or it is a launch program in device memory, made once per step by vllm_ascend_pd::tile_*: then a
// call only enqueues. Needs the headers of the torch_npu wheel; the kernels come from CANN's build of kernels.cpp.
#include <ATen/ATen.h>
#include <acl/acl_rt.h>
#include <torch/library.h>

#include <array>
#include <string>
#include <vector>

#include "../tensors.h"
#include "programs.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"
#include "torch_npu/csrc/framework/OpCommand.h"

// What `ascendc_library` generates for direct launch.
extern "C" {
uint32_t aclrtlaunch_vapd_gather(uint32_t cores, aclrtStream stream, void* c0, void* c1, void* c2, void* c3, void* c4,
                                 void* c5, void* c6, void* c7, void* out, void* program);
uint32_t aclrtlaunch_vapd_scatter(uint32_t cores, aclrtStream stream, void* buffer, void* c0, void* c1, void* c2,
                                  void* c3, void* c4, void* c5, void* c6, void* c7, void* program);
uint32_t aclrtlaunch_vapd_assemble(uint32_t cores, aclrtStream stream, void* received, void* out, void* program);
}

namespace vapd {
namespace {

using at::Tensor;

// The AI vector cores of the current device: all kernels here use only those.
int64_t vector_cores() {
  int64_t count = 0;
  int32_t device = 0;
  TORCH_CHECK(aclrtGetDevice(&device) == ACL_SUCCESS, "no NPU is current");
  const aclError rc = aclrtGetDeviceInfo(device, ACL_DEV_ATTR_VECTOR_CORE_NUM, &count);
  TORCH_CHECK(rc == ACL_SUCCESS && count > 0, "the number of vector cores is unknown (", rc, ")");
  return count;
}

void must_be_npu(const char* op, const char* name, const Tensor& tensor, const Tensor& first) {
  if (!tensor.is_privateuseone()) refuse(op, std::string(name) + " is not on the NPU");
  if (tensor.device() != first.device()) {
    refuse(op, std::string(name) + " is on " + tensor.device().str() + ", not on " + first.device().str());
  }
}

std::vector<CacheView> views_of(const char* op, at::TensorList caches, const Tensor& buffer) {
  check_regions(op, static_cast<int64_t>(caches.size()), kNpuRegions);
  std::vector<CacheView> views;
  for (size_t i = 0; i < caches.size(); ++i) {
    must_be_npu(op, "a cache", caches[i], buffer);
    views.push_back(view_of(op, static_cast<int64_t>(i), caches[i]));
  }
  return views;
}

// The program in device memory: `rows` itself, or made of it by `tile(count)`.
template <typename Tile>
Tensor program_of(const char* op, const Tensor& rows, const Tensor& buffer, const Tile& tile) {
  const bool is_int64 = rows.scalar_type() == at::kLong;
  if (!rows.is_cpu()) {
    must_be_npu(op, "rows", rows, buffer);
    check_table(op, rows, is_int64, kMoveWords);
    return rows;
  }
  check_table(op, rows, is_int64, kColumns);
  const Tiling tiling = tile(rows.size(0));
  const Tensor table = at::empty({tiling.rows(), kMoveWords}, rows.options());
  tiling.write(table.mutable_data_ptr<int64_t>());
  return table.to(buffer.device());
}

std::array<void*, kNpuRegions> addresses_of(at::TensorList caches) {
  std::array<void*, kNpuRegions> found{};
  for (size_t i = 0; i < caches.size(); ++i) found[i] = caches[i].data_ptr();
  return found;
}

// Enqueues `launch(cores, stream)`. Addresses are taken by value: the queue may run after the caller has gone on, and
// has let go of the program.
template <typename Launch>
void enqueue(const char* name, const Tensor& program, const Launch& launch) {
  const c10_npu::NPUStream current = c10_npu::getCurrentNPUStream();
  program.record_stream(current.unwrap());
  const aclrtStream stream = current.stream(false);
  const auto cores = static_cast<uint32_t>(vector_cores());
  at_npu::native::OpCommand command;
  command.Name(name);
  command.SetCustomHandler([=]() -> int { return static_cast<int>(launch(cores, stream)); });
  command.Run();
}

void gather(at::TensorList caches, const Tensor& rows, Tensor& out) {
  const char* op = "gather";
  must_be_npu(op, "out", out, out);
  const std::vector<CacheView> views = views_of(op, caches, out);
  const int64_t out_bytes = bytes_of(op, "out", out);
  const Tensor program = program_of(op, rows, out, [&](int64_t count) {
    return tile_gather(views, static_cast<const CacheRow*>(rows.const_data_ptr()), count, out_bytes, vector_cores());
  });
  const auto c = addresses_of(caches);
  void *const to = out.data_ptr(), *const table = program.data_ptr();
  enqueue("vapd_gather", program, [=](uint32_t cores, aclrtStream stream) {
    return aclrtlaunch_vapd_gather(cores, stream, c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7], to, table);
  });
}

void scatter(const Tensor& buffer, const Tensor& rows, at::TensorList caches) {
  const char* op = "scatter";
  must_be_npu(op, "buffer", buffer, buffer);
  const std::vector<CacheView> views = views_of(op, caches, buffer);
  const int64_t buffer_bytes = bytes_of(op, "buffer", buffer);
  const Tensor program = program_of(op, rows, buffer, [&](int64_t count) {
    return tile_scatter(views, static_cast<const CacheRow*>(rows.const_data_ptr()), count, buffer_bytes,
                        vector_cores());
  });
  const auto c = addresses_of(caches);
  void *const from = buffer.data_ptr(), *const table = program.data_ptr();
  enqueue("vapd_scatter", program, [=](uint32_t cores, aclrtStream stream) {
    return aclrtlaunch_vapd_scatter(cores, stream, from, c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7], table);
  });
}

void assemble(const Tensor& received, const Tensor& rows, Tensor& out) {
  const char* op = "assemble";
  must_be_npu(op, "out", out, out);
  must_be_npu(op, "received", received, out);
  const int64_t src_bytes = bytes_of(op, "received", received), dst_bytes = bytes_of(op, "out", out);
  const Tensor program = program_of(op, rows, out, [&](int64_t count) {
    return tile_assemble(static_cast<const BufferRow*>(rows.const_data_ptr()), count, src_bytes, dst_bytes,
                         vector_cores());
  });
  void *const from = received.data_ptr(), *const to = out.data_ptr(), *const table = program.data_ptr();
  enqueue("vapd_assemble", program, [=](uint32_t cores, aclrtStream stream) {
    return aclrtlaunch_vapd_assemble(cores, stream, from, to, table);
  });
}

}  // namespace
}  // namespace vapd

TORCH_LIBRARY_FRAGMENT(vllm_ascend_pd, m) {
  m.def("vector_cores() -> int", &vapd::vector_cores);
}

TORCH_LIBRARY_IMPL(vllm_ascend_pd, PrivateUse1, m) {
  m.impl("gather", &vapd::gather);
  m.impl("assemble", &vapd::assemble);
  m.impl("scatter", &vapd::scatter);
}
