// SPDX-License-Identifier: Apache-2.0
// Runs the NPU kernels' source on the emulated machine: case files as they are, with a corrupted program, and small
// kernels that are wrong on purpose. One line of JSON per run.
//
//   kernel_runner run --cores 1,7,8:3 --seeds 3 CASE…    every case on every number of cores with every seed; 8:3 is a
//                                                        program made for 8 cores on 3
//   kernel_runner corrupt FAULT CASE                     the case with its launch program damaged
//   kernel_runner far FAULT                              a block behind 4 GiB of its cache
//   kernel_runner faulty NAME                            a faulty kernel of faulty_kernels.h
#include <sys/mman.h>

#include <cstdio>
#include <sstream>
#include <string>

#include "case.h"
#include "corruptions.h"
#include "faulty_kernels.h"
#include "npu/kernels.cpp"
#include "npu/programs.h"

namespace native {

std::vector<int64_t> program_of(const Case& c, int64_t cores) {
  const auto write = [](const vapd::Tiling& tiling) {
    std::vector<int64_t> table(tiling.rows() * vapd::kMoveWords);
    tiling.write(table.data());
    return table;
  };
  const auto bytes = [&](size_t tensor) { return static_cast<int64_t>(c.before[tensor].size()); };
  switch (c.kind) {
    case Kind::kGather:
      return write(vapd::tile_gather(c.views, c.cache_rows(), c.row_count(), bytes(c.views.size()), cores));
    case Kind::kScatter:
      return write(vapd::tile_scatter(c.views, c.cache_rows(), c.row_count(), bytes(c.views.size()), cores));
    default:
      return write(vapd::tile_assemble(c.buffer_rows(), c.row_count(), bytes(0), bytes(1), cores));
  }
}

// Runs the kernel over fresh copies of the tensors.
emulation::Report run(const Case& c, std::vector<int64_t>& program, int cores, unsigned seed) {
  std::vector<Block> tensors = c.before;
  emulation::Memory memory;
  for (size_t i = 0; i < tensors.size(); ++i) memory.add(tensors[i].data(), tensors[i].size(), c.writes(i));
  memory.add(program.data(), program.size() * 8, false);
  GM_ADDR at[vapd::kBases] = {};
  for (size_t i = 0; i < tensors.size(); ++i) at[i] = reinterpret_cast<GM_ADDR>(tensors[i].data());
  const GM_ADDR table = reinterpret_cast<GM_ADDR>(program.data());
  const GM_ADDR buffer = at[c.views.size()];
  if (!c.views.empty()) at[c.views.size()] = nullptr;
  emulation::Report report = emulation::launch(cores, seed, memory, [&] {
    if (c.kind == Kind::kGather) vapd_gather(at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7], buffer, table);
    if (c.kind == Kind::kScatter) vapd_scatter(buffer, at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7], table);
    if (c.kind == Kind::kAssemble) vapd_assemble(at[0], at[1], table);
  });
  for (size_t i = 0; report.fault.empty() && i < tensors.size(); ++i) {
    if (!(tensors[i] == c.expected[i])) report.fault = "wrong data: tensor " + std::to_string(i);
  }
  return report;
}

void print(const std::string& what, int cores, unsigned seed, const emulation::Report& report) {
  const emulation::Statistics& s = report.statistics;
  uint64_t most = 0;
  for (const uint64_t bytes : s.bytes_by_core) most = std::max(most, bytes);
  std::printf(
      "{\"case\": \"%s\", \"cores\": %d, \"seed\": %u, \"fault\": \"%s\", \"loads\": %llu, \"stores\": %llu, "
      "\"bytes\": %llu, \"short\": %llu, \"unaligned\": %llu, \"busiest\": %llu, \"ub\": %llu}\n",
      what.c_str(), cores, seed, report.fault.c_str(), static_cast<unsigned long long>(s.loads),
      static_cast<unsigned long long>(s.stores), static_cast<unsigned long long>(s.stored),
      static_cast<unsigned long long>(s.short_copies), static_cast<unsigned long long>(s.unaligned),
      static_cast<unsigned long long>(most), static_cast<unsigned long long>(s.ub_peak));
}

struct Cores {
  int planned, launched;
};

std::vector<Cores> numbers(const std::string& list) {
  std::vector<Cores> found;
  std::istringstream in(list);
  for (std::string word; std::getline(in, word, ',');) {
    const size_t colon = word.find(':');
    found.push_back({std::stoi(word), std::stoi(colon == std::string::npos ? word : word.substr(colon + 1))});
  }
  return found;
}

int run_cases(const std::vector<std::string>& arguments) {
  const std::vector<Cores> cores = numbers(arguments.at(1));
  const unsigned seeds = std::stoul(arguments.at(3));
  for (size_t i = 4; i < arguments.size(); ++i) {
    const Case c = read_case(arguments[i]);
    for (const auto& [planned, launched] : cores) {
      std::vector<int64_t> program = program_of(c, planned);
      for (unsigned seed = 0; seed < seeds; ++seed) {
        print(arguments[i], launched, seed, run(c, program, launched, seed));
      }
    }
  }
  return 0;
}

int run_corrupted(const std::string& fault, const std::string& path) {
  const Case c = read_case(path);
  std::vector<int64_t> program = program_of(c, 8);
  corrupt(fault, program);
  for (unsigned seed = 0; seed < 4; ++seed) print(fault, 8, seed, run(c, program, 8, seed));
  return 0;
}

// One block far behind 4 GiB of a cache that has no memory elsewhere, moved to the front of a buffer.
int run_far(const std::string& fault) {
  const int64_t block = 1 << 18, blocks = (int64_t{5} << 30) / block;
  void* cache =
      mmap(nullptr, block * blocks, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (cache == MAP_FAILED) throw std::runtime_error("mmap failed");
  char* last = static_cast<char*>(cache) + block * (blocks - 1);
  for (int64_t i = 0; i < block; ++i) last[i] = static_cast<char>(i % 251 + 1);
  const vapd::CacheRow row{0, blocks - 1, 0, 0, 1, 1, 0, 0, 0};
  const vapd::Tiling tiling = vapd::tile_gather({{blocks, 1, 1, block, block, 0, 0}}, &row, 1, block, 4);
  std::vector<int64_t> program(tiling.rows() * vapd::kMoveWords);
  tiling.write(program.data());
  corrupt(fault, program);
  std::vector<char> out(block);
  emulation::Memory memory;
  memory.add(cache, block * blocks, false);
  memory.add(out.data(), out.size(), true);
  memory.add(program.data(), program.size() * 8, false);
  const auto at = [](void* p) { return static_cast<GM_ADDR>(p); };
  emulation::Report report = emulation::launch(4, 1, memory, [&] {
    vapd_gather(at(cache), nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, at(out.data()),
                at(program.data()));
  });
  if (report.fault.empty() && std::memcmp(out.data(), last, block) != 0) report.fault = "wrong data: far block";
  print(fault, 4, 1, report);
  munmap(cache, block * blocks);
  return 0;
}

int run_faulty(const std::string& name) {
  for (unsigned seed = 0; seed < 8; ++seed) print(name, 2, seed, faulty::run(name, seed));
  return 0;
}

int main_(const std::vector<std::string>& arguments) {
  if (arguments.size() > 4 && arguments[0] == "run" && arguments[1] == "--cores" && arguments[3] == "--seeds") {
    return run_cases({arguments.begin() + 1, arguments.end()});
  }
  if (arguments.size() == 3 && arguments[0] == "corrupt") return run_corrupted(arguments[1], arguments[2]);
  if (arguments.size() == 2 && arguments[0] == "far") return run_far(arguments[1]);
  if (arguments.size() == 2 && arguments[0] == "faulty") return run_faulty(arguments[1]);
  std::fprintf(stderr, "usage: run --cores LIST --seeds N CASE… | corrupt FAULT CASE | far FAULT | faulty NAME\n");
  return 2;
}

}  // namespace native

int main(int count, char** values) {
  try {
    return native::main_({values + 1, values + count});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
