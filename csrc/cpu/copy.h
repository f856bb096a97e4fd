// SPDX-License-Identifier: Apache-2.0
// Copying a box as fast as memory allows: contiguous axes merged, streaming stores for long runs.
#pragma once

#include <cstdint>
#include <cstring>

#include "../runs.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace vapd {

// From this run length on streaming stores pay: a send buffer is not read back before it leaves, so fetching its lines
// into the cache (which an ordinary store does) is wasted. Below it, write-combining buffers are flushed half full.
constexpr int64_t kStreamBytes = 1024;
constexpr int64_t kLine = 64;

#if defined(__SSE2__)
// `dst` is aligned to a line, `bytes` is a multiple of one.
inline void stream_lines(char* dst, const char* src, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kLine) {
    const auto* in = reinterpret_cast<const __m128i*>(src + at);
    auto* out = reinterpret_cast<__m128i*>(dst + at);
    const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1), c = _mm_loadu_si128(in + 2),
                  d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
}
inline void stream_fence() {
  _mm_sfence();
}
#else
// Elsewhere (aarch64) memcpy of the C library already chooses its stores by size.
inline void stream_lines(char* dst, const char* src, int64_t bytes) {
  std::memcpy(dst, src, bytes);
}
inline void stream_fence() {}
#endif

inline void copy_long(char* dst, const char* src, int64_t bytes) {
  const int64_t head = (kLine - reinterpret_cast<uintptr_t>(dst) % kLine) % kLine;
  if (bytes < kStreamBytes + head) {
    std::memcpy(dst, src, bytes);
    return;
  }
  const int64_t lines = (bytes - head) / kLine * kLine;
  if (head) std::memcpy(dst, src, head);
  stream_lines(dst + head, src + head, lines);
  if (bytes > head + lines) std::memcpy(dst + head + lines, src + head + lines, bytes - head - lines);
}

// Copies the runs of one short, fixed width: the compiler unrolls what memcpy would branch over.
template <int64_t Width>
inline void copy_fixed(char* dst, const char* src, int64_t count, int64_t dst_stride, int64_t src_stride) {
  for (int64_t i = 0; i < count; ++i) std::memcpy(dst + i * dst_stride, src + i * src_stride, Width);
}

// Copies `count` equal runs; where each fills whole lines of its own, streaming pays whatever the width.
inline void copy_column(char* dst, const char* src, int64_t width, int64_t count, int64_t dst_stride,
                        int64_t src_stride) {
  if (width % kLine == 0 && reinterpret_cast<uintptr_t>(dst) % kLine == 0 && dst_stride % kLine == 0) {
    for (int64_t i = 0; i < count; ++i) stream_lines(dst + i * dst_stride, src + i * src_stride, width);
    return;
  }
  switch (width) {
    case 64:
      return copy_fixed<64>(dst, src, count, dst_stride, src_stride);
    case 128:
      return copy_fixed<128>(dst, src, count, dst_stride, src_stride);
    case 256:
      return copy_fixed<256>(dst, src, count, dst_stride, src_stride);
    case 512:
      return copy_fixed<512>(dst, src, count, dst_stride, src_stride);
    default:
      for (int64_t i = 0; i < count; ++i) copy_long(dst + i * dst_stride, src + i * src_stride, width);
  }
}

// Copies the bytes [from, to) of a box, counted in the order of its runs: so that threads share a box evenly.
inline void copy_share(const Box& box, const char* src_base, char* dst_base, int64_t from, int64_t to) {
  const Runs runs(box);
  const char* src = src_base + runs.src;
  char* dst = dst_base + runs.dst;
  const auto src_at = [&](int64_t run) {
    return src + run / runs.inner * runs.src_outer + run % runs.inner * runs.src_inner;
  };
  const auto dst_at = [&](int64_t run) {
    return dst + run / runs.inner * runs.dst_outer + run % runs.inner * runs.dst_inner;
  };
  int64_t run = from / runs.width;
  if (const int64_t skip = from % runs.width; skip) {
    const int64_t end = to < (run + 1) * runs.width ? to - run * runs.width : runs.width;
    copy_long(dst_at(run) + skip, src_at(run) + skip, end - skip);
    ++run;
  }
  const int64_t whole = to / runs.width;
  while (run < whole) {
    const int64_t left = runs.inner - run % runs.inner;
    const int64_t count = left < whole - run ? left : whole - run;
    copy_column(dst_at(run), src_at(run), runs.width, count, runs.dst_inner, runs.src_inner);
    run += count;
  }
  if (run == whole && to > whole * runs.width) copy_long(dst_at(run), src_at(run), to - whole * runs.width);
}

}  // namespace vapd
