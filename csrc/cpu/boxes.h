// SPDX-License-Identifier: Apache-2.0
// The three ops over plain memory: check every row, then let the threads share the payload by bytes.
//
// `Parallel` is torch's parallel_for in the ops and a plain thread loop in the native tests. Nothing is allocated.
#pragma once

#include <cstdint>

#include "../rows.h"
#include "copy.h"

namespace vapd {

// Threads take the payload in pages, and none is woken for less than a grain.
constexpr int64_t kPage = 4096;
constexpr int64_t kGrainPages = 32;
constexpr int64_t kMaxRegions = 8;

struct Caches {
  CacheView views[kMaxRegions];
  char* bases[kMaxRegions];
  int64_t count;
};

// Runs `copy(row, from, to)` over all rows, each thread over its share of the payload.
// `bytes(row)` is cheap: every thread walks the table to find where its share begins.
template <typename Parallel, typename Bytes, typename Copy>
void share_payload(const Parallel& parallel, int64_t rows, int64_t total, const Bytes& bytes, const Copy& copy) {
  const int64_t pages = (total + kPage - 1) / kPage;
  parallel(int64_t{0}, pages, kGrainPages, [&](int64_t first_page, int64_t end_page) {
    const int64_t lo = first_page * kPage;
    const int64_t hi = end_page * kPage < total ? end_page * kPage : total;
    int64_t at = 0;
    for (int64_t row = 0; row < rows && at < hi; ++row) {
      const int64_t size = bytes(row);
      if (at + size > lo) copy(row, lo > at ? lo - at : 0, hi - at < size ? hi - at : size);
      at += size;
    }
    stream_fence();
  });
}

template <typename Parallel>
void gather_boxes(const Parallel& parallel, const Caches& caches, const CacheRow* rows, int64_t count, char* out,
                  int64_t out_bytes) {
  const auto bytes = [&](int64_t i) { return rows[i].heads * rows[i].tokens * caches.views[rows[i].region].cell; };
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    check_row("gather", i, rows[i], caches.views, caches.count, out_bytes, true);
    total += bytes(i);
  }
  share_payload(parallel, count, total, bytes, [&](int64_t i, int64_t from, int64_t to) {
    const int64_t region = rows[i].region;
    copy_share(gather_box(rows[i], caches.views[region]), caches.bases[region], out, from, to);
  });
}

template <typename Parallel>
void scatter_boxes(const Parallel& parallel, const char* buffer, int64_t buffer_bytes, const CacheRow* rows,
                   int64_t count, const Caches& caches) {
  const auto bytes = [&](int64_t i) { return rows[i].heads * rows[i].tokens * caches.views[rows[i].region].cell; };
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    check_row("scatter", i, rows[i], caches.views, caches.count, buffer_bytes, false);
    total += bytes(i);
  }
  share_payload(parallel, count, total, bytes, [&](int64_t i, int64_t from, int64_t to) {
    const int64_t region = rows[i].region;
    copy_share(scatter_box(rows[i], caches.views[region]), buffer, caches.bases[region], from, to);
  });
}

template <typename Parallel>
void assemble_boxes(const Parallel& parallel, const char* src, int64_t src_bytes, const BufferRow* rows, int64_t count,
                    char* dst, int64_t dst_bytes) {
  const auto bytes = [&](int64_t i) { return rows[i].heads * rows[i].tokens * rows[i].cell; };
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    check_row("assemble", i, rows[i], src_bytes, dst_bytes);
    total += bytes(i);
  }
  share_payload(parallel, count, total, bytes,
                [&](int64_t i, int64_t from, int64_t to) { copy_share(assemble_box(rows[i]), src, dst, from, to); });
}

}  // namespace vapd
