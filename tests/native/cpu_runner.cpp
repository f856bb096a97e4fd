// SPDX-License-Identifier: Apache-2.0
// Runs case files through the CPU ops' core, without torch: under the address sanitizer, and on other architectures.
//
//   cpu_runner THREADS CASE…     one line per case: its name, then "ok" or what is wrong
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "case.h"
#include "cpu/boxes.h"

namespace native {

// Divides a range as torch's parallel_for does: equal parts of at least `grain`.
class Threads {
 public:
  explicit Threads(int64_t count) : count_(count) {}

  template <typename Share>
  void operator()(int64_t begin, int64_t end, int64_t /*grain: small cases are to be shared too*/,
                  const Share& share) const {
    const int64_t part = (end - begin + count_ - 1) / count_;
    std::vector<std::thread> threads;
    for (int64_t at = begin; at < end; at += part) {
      threads.emplace_back([&share, at, last = std::min(end, at + part)] { share(at, last); });
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  int64_t count_;
};

std::string run(const Case& c, int64_t threads) {
  std::vector<Block> tensors = c.before;
  vapd::Caches caches{};
  caches.count = static_cast<int64_t>(c.views.size());
  for (int64_t i = 0; i < caches.count; ++i) {
    caches.views[i] = c.views[i];
    caches.bases[i] = tensors[i].data();
  }
  const Block& last = tensors.back();
  const auto last_bytes = static_cast<int64_t>(last.size());
  const Threads parallel(threads);
  switch (c.kind) {
    case Kind::kGather:
      vapd::gather_boxes(parallel, caches, c.cache_rows(), c.row_count(), last.data(), last_bytes);
      break;
    case Kind::kScatter:
      vapd::scatter_boxes(parallel, last.data(), last_bytes, c.cache_rows(), c.row_count(), caches);
      break;
    default:
      vapd::assemble_boxes(parallel, tensors[0].data(), static_cast<int64_t>(tensors[0].size()), c.buffer_rows(),
                           c.row_count(), last.data(), last_bytes);
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!(tensors[i] == c.expected[i])) return "wrong data: tensor " + std::to_string(i);
  }
  return "ok";
}

}  // namespace native

int main(int count, char** values) {
  try {
    const int64_t threads = std::stoll(values[1]);
    for (int i = 2; i < count; ++i) {
      std::printf("%s %s\n", values[i], native::run(native::read_case(values[i]), threads).c_str());
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
