// SPDX-License-Identifier: Apache-2.0
// Entry points of the kernels, for direct launch (aclrtlaunch_vapd_*). One name per op, so that a profile tells them
// apart; the program says what to move.
#include "kernels.h"

namespace {

__aicore__ inline void move_all(const GM_ADDR (&bases)[vapd::kBases], GM_ADDR program) {
  AscendC::TPipe pipe;
  vapd::Mover mover;
  mover.init(bases, program, &pipe);
  mover.run();
}

}  // namespace

extern "C" __global__ __aicore__ void vapd_gather(GM_ADDR cache0, GM_ADDR cache1, GM_ADDR cache2, GM_ADDR cache3,
                                                  GM_ADDR cache4, GM_ADDR cache5, GM_ADDR cache6, GM_ADDR cache7,
                                                  GM_ADDR out, GM_ADDR program) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  const GM_ADDR bases[vapd::kBases] = {cache0, cache1, cache2, cache3, cache4, cache5, cache6, cache7, out};
  move_all(bases, program);
}

extern "C" __global__ __aicore__ void vapd_scatter(GM_ADDR buffer, GM_ADDR cache0, GM_ADDR cache1, GM_ADDR cache2,
                                                   GM_ADDR cache3, GM_ADDR cache4, GM_ADDR cache5, GM_ADDR cache6,
                                                   GM_ADDR cache7, GM_ADDR program) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  const GM_ADDR bases[vapd::kBases] = {cache0, cache1, cache2, cache3, cache4, cache5, cache6, cache7, buffer};
  move_all(bases, program);
}

extern "C" __global__ __aicore__ void vapd_assemble(GM_ADDR received, GM_ADDR out, GM_ADDR program) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  const GM_ADDR bases[vapd::kBases] = {received, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, out};
  move_all(bases, program);
}
