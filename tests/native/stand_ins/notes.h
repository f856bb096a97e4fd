// SPDX-License-Identifier: Apache-2.0
// What a process asks of the stand-ins, each thing once, in STAND_IN_NOTES/<process>; nothing without that variable.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>
#include <set>
#include <string>

namespace stand_in {

inline bool notes_wanted() {
  static const bool wanted = std::getenv("STAND_IN_NOTES") != nullptr;
  return wanted;
}

// A process that was forked notes again what its parent has noted.
inline void note(const std::string& line) {
  static std::mutex lock;
  static auto* const noted = new std::set<std::string>;
  static pid_t process = 0;
  const std::lock_guard<std::mutex> hold(lock);
  if (process != getpid()) noted->clear();
  process = getpid();
  if (!noted->insert(line).second) return;
  const std::string path = std::string(std::getenv("STAND_IN_NOTES")) + "/" + std::to_string(process);
  const int file = open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  if (file < 0) return;
  const std::string whole = line + "\n";
  [[maybe_unused]] const ssize_t written = write(file, whole.data(), whole.size());
  close(file);
}

}  // namespace stand_in
