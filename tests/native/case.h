// SPDX-License-Identifier: Apache-2.0
// A case file: rows, tensors and the expected result. Python writes it (native_cases.py), the native runners execute
// it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "rows.h"

namespace native {

// Memory as from a device allocator: aligned to 512 bytes, without slack at its end, so that ASAN detects any overrun.
class Block {
 public:
  explicit Block(uint64_t size) : size_(size) {
    void* at = nullptr;
    if (posix_memalign(&at, 512, size ? size : 1) != 0) throw std::bad_alloc();
    at_ = static_cast<char*>(at);
  }
  Block(const Block& other) : Block(other.size_) { std::memcpy(at_, other.at_, size_); }
  Block(Block&& other) noexcept : at_(other.at_), size_(other.size_) { other.at_ = nullptr; }
  Block& operator=(const Block& other) {
    if (size_ != other.size_) throw std::logic_error("blocks differ in size");
    std::memcpy(at_, other.at_, size_);
    return *this;
  }
  ~Block() { std::free(at_); }

  char* data() const { return at_; }
  uint64_t size() const { return size_; }
  bool operator==(const Block& other) const { return size_ == other.size_ && !std::memcmp(at_, other.at_, size_); }

 private:
  char* at_ = nullptr;
  uint64_t size_;
};

enum class Kind : int64_t { kGather, kAssemble, kScatter };

struct Case {
  Kind kind;
  std::vector<vapd::CacheView> views;
  std::vector<int64_t> rows;
  std::vector<Block> before;    // the given tensors: caches, then buffers
  std::vector<Block> expected;  // the same after the op

  int64_t row_count() const { return static_cast<int64_t>(rows.size()) / vapd::kColumns; }
  const vapd::CacheRow* cache_rows() const { return reinterpret_cast<const vapd::CacheRow*>(rows.data()); }
  const vapd::BufferRow* buffer_rows() const { return reinterpret_cast<const vapd::BufferRow*>(rows.data()); }
  // The tensors that the op writes: the last buffer, or the caches.
  bool writes(size_t tensor) const {
    return kind == Kind::kScatter ? tensor < views.size() : tensor + 1 == before.size();
  }
};

inline Case read_case(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot open " + path);
  const auto words = [&](int64_t* at, int64_t count) { in.read(reinterpret_cast<char*>(at), count * 8); };
  int64_t head[5];
  words(head, 5);
  if (head[0] != 0x45534143) throw std::runtime_error(path + " is no case file");
  Case found;
  found.kind = static_cast<Kind>(head[1]);
  found.rows.resize(head[2] * vapd::kColumns);
  found.views.resize(head[3]);
  for (auto& view : found.views) words(reinterpret_cast<int64_t*>(&view), 7);
  std::vector<int64_t> sizes(head[4]);
  words(sizes.data(), head[4]);
  words(found.rows.data(), static_cast<int64_t>(found.rows.size()));
  for (auto* tensors : {&found.before, &found.expected}) {
    for (const int64_t size : sizes) {
      tensors->emplace_back(size);
      in.read(tensors->back().data(), size);
    }
  }
  if (!in) throw std::runtime_error(path + " is too short");
  return found;
}

}  // namespace native
