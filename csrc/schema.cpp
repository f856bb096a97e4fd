// SPDX-License-Identifier: Apache-2.0
// The schema of the ops, one for every device. docs/ops.md explains the rows.
//
// Out-variants only: nothing is allocated on the way of a layer. A destination's bytes that no row names stay as they
// are. `rows` is an int64 table [n, 9] on the CPU; the NPU also takes the launch table that `tile_*` made of it.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(vllm_ascend_pd, m) {
  // Paged caches [block, head, token, cell] -> send buffer, ordered by destination rank.
  m.def("gather(Tensor[] caches, Tensor rows, Tensor(a!) out) -> ()");
  // Receive buffer -> staging in D's block layout.
  m.def("assemble(Tensor received, Tensor rows, Tensor(a!) out) -> ()");
  // The way back, buffer -> paged caches: what tests compare with.
  m.def("scatter(Tensor buffer, Tensor rows, Tensor(a!)[] caches) -> ()");
}
