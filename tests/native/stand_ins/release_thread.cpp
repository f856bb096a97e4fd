// SPDX-License-Identifier: Apache-2.0
// torch_npu's release threads, one for each stream, wait for work by sleeping for a microsecond at a time. On a machine
// with few cores those of some ranks take a third of it from what the ranks compute. Preloaded, this library finds them
// by the name that they give themselves, and lets the kernel end their sleeps some milliseconds late.
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdarg>
#include <cstring>

extern "C" int prctl(int option, ...) {
  constexpr unsigned long kSlackNs = 5'000'000;
  va_list rest;
  va_start(rest, option);
  unsigned long words[4];
  for (unsigned long& word : words) word = va_arg(rest, unsigned long);
  va_end(rest);
  if (option == PR_SET_NAME && std::strcmp(reinterpret_cast<const char*>(words[0]), "release_thread") == 0)
    syscall(SYS_prctl, PR_SET_TIMERSLACK, kSlackNs, 0, 0, 0);
  return static_cast<int>(syscall(SYS_prctl, option, words[0], words[1], words[2], words[3]));
}
