// SPDX-License-Identifier: Apache-2.0
// The schema of the ops, one for every device. docs/ops.md explains the rows.
//
// Out-variants only: nothing is allocated on the way of a layer. A destination's bytes that no row names stay as they
// are. `rows` is an int64 table [n, 9] in host memory; on the NPU it may also be the launch program that `tile_*` made
// of such a table, in device memory.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(vllm_ascend_pd, m) {
  // Paged caches [block, head, token, cell] -> send buffer, ordered by destination rank.
  m.def("gather(Tensor[] caches, Tensor rows, Tensor(a!) out) -> ()");
  // Receive buffer -> staging in D's block layout.
  m.def("assemble(Tensor received, Tensor rows, Tensor(a!) out) -> ()");
  // The way back, buffer -> paged caches: what tests compare with.
  m.def("scatter(Tensor buffer, Tensor rows, Tensor(a!)[] caches) -> ()");

  // Rows -> launch program, on the host, once per step.
  m.def("tile_gather(int[] views, Tensor rows, int out_bytes, int cores, Tensor(a!) program) -> int");
  m.def("tile_scatter(int[] views, Tensor rows, int buffer_bytes, int cores, Tensor(a!) program) -> int");
  m.def("tile_assemble(Tensor rows, int received_bytes, int out_bytes, int cores, Tensor(a!) program) -> int");
}
