// SPDX-License-Identifier: Apache-2.0
// aclrtlaunch_vapd_*: the functions that CANN's build generates for direct launch, over the emulated AI cores. A kernel
// may only touch the device allocations of its arguments; a fault ends the process with its name.
#include <acl/acl_rt.h>

#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "notes.h"
#include "npu/kernels.cpp"
#include "streams.h"

namespace {

using stand_in::stream_of;

struct Argument {
  void* at;
  bool writable;
};

template <typename Kernel>
uint32_t launch(const char* name, uint32_t cores, void* stream, std::initializer_list<Argument> arguments,
                Kernel kernel) {
  static unsigned seed = 0;
  if (stand_in::notes_wanted()) stand_in::note("kernel " + std::string(name));
  emulation::Memory memory;
  for (const Argument& argument : arguments) {
    if (argument.at == nullptr) continue;
    const stand_in::Allocation found = stand_in::allocation_of(argument.at);
    if (found.start == nullptr) {
      std::fprintf(stderr, "%s: an argument is not device memory\n", name);
      return 107000;
    }
    memory.add(found.start, found.size, argument.writable);
  }
  stream_of(stream).submit([=, number = seed++] {
    const emulation::Report report = emulation::launch(static_cast<int>(cores), number, memory, kernel);
    if (!report.fault.empty()) {
      std::fprintf(stderr, "%s: %s\n", name, report.fault.c_str());
      std::_Exit(71);
    }
  });
  return 0;
}

GM_ADDR gm(void* at) {
  return static_cast<GM_ADDR>(at);
}

}  // namespace

extern "C" {

uint32_t aclrtlaunch_vapd_gather(uint32_t cores, aclrtStream stream, void* c0, void* c1, void* c2, void* c3, void* c4,
                                 void* c5, void* c6, void* c7, void* out, void* program) {
  // torch may place all tensors in one segment of its allocator, so caches count as writable here.
  return launch(
      "vapd_gather", cores, stream,
      {{out, true},
       {c0, true},
       {c1, true},
       {c2, true},
       {c3, true},
       {c4, true},
       {c5, true},
       {c6, true},
       {c7, true},
       {program, true}},
      [=] { vapd_gather(gm(c0), gm(c1), gm(c2), gm(c3), gm(c4), gm(c5), gm(c6), gm(c7), gm(out), gm(program)); });
}

uint32_t aclrtlaunch_vapd_scatter(uint32_t cores, aclrtStream stream, void* buffer, void* c0, void* c1, void* c2,
                                  void* c3, void* c4, void* c5, void* c6, void* c7, void* program) {
  return launch(
      "vapd_scatter", cores, stream,
      {{buffer, true},
       {c0, true},
       {c1, true},
       {c2, true},
       {c3, true},
       {c4, true},
       {c5, true},
       {c6, true},
       {c7, true},
       {program, true}},
      [=] { vapd_scatter(gm(buffer), gm(c0), gm(c1), gm(c2), gm(c3), gm(c4), gm(c5), gm(c6), gm(c7), gm(program)); });
}

uint32_t aclrtlaunch_vapd_assemble(uint32_t cores, aclrtStream stream, void* received, void* out, void* program) {
  return launch("vapd_assemble", cores, stream, {{received, true}, {out, true}, {program, true}},
                [=] { vapd_assemble(gm(received), gm(out), gm(program)); });
}

}  // extern "C"
