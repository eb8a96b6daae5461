// How often each magnitude of |c| occurs, before elements are selected. Definition: the torch
// reference in _magnitudes.py.
#include <algorithm>
#include <new>
#include <vector>

#include "blocks.h"
#include "narrow.h"

namespace {

using namespace gw;

constexpr int64_t kNumBins = 1 << 16;       // a bin for each value of a float's upper half
constexpr int64_t kTable = kNumBins + 80;   // equal bins of two tables share no line of a cache
constexpr int64_t kCountBlock = 4096;       // elements that the first cache holds

// Buffers that live as long as the calling thread; the tables are zeros between calls.
struct Scratch {
  std::vector<uint32_t> tables;
  std::vector<int32_t> bins;
  std::vector<int64_t> counts;  // two for each of the bins: of its positive and negative elements
};

Scratch& scratch() {
  thread_local Scratch buffers;
  return buffers;
}

void accumulate(const float* g, float* r, int64_t n) {
  for (int64_t i = 0; i < n; ++i) r[i] = g[i] + r[i];
}

// An element's bin is its upper half, which is read as such. Neighbours count in different tables:
// adding to one counter twice in a row waits for the first.
void count_block(const float* c, int64_t n, uint32_t* even, uint32_t* odd) {
  constexpr int64_t kLine = 16;
  int64_t i = 0;
  for (; i + kLine <= n; i += kLine) {
    prefetch_ahead(c + i);
    uint16_t halves[2 * kLine];
    std::memcpy(halves, c + i, sizeof halves);
    for (int64_t j = 1; j < 2 * kLine; j += 4) {
      ++even[halves[j]];
      ++odd[halves[j + 2]];
    }
  }
  for (; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, c + i, sizeof bits);
    ++even[bits >> 16];
  }
}

void count_slice(const float* g, float* r, int64_t start, int64_t stop, uint32_t* even,
                 uint32_t* odd) {
  for (int64_t first = start; first < stop; first += kCountBlock) {
    const int64_t size = min64(kCountBlock, stop - first);
    if (r) accumulate(g + first, r + first, size);
    count_block((r ? r : g) + first, size, even, odd);
  }
}

int64_t take(uint32_t* tables, int64_t num_tables, int64_t bin) {
  int64_t count = 0;
  for (int64_t t = 0; t < num_tables; ++t) {
    count += tables[t * kTable + bin];
    tables[t * kTable + bin] = 0;
  }
  return count;
}

// Lists the magnitudes that occur, each with how often either sign does, and empties the tables.
void list_bins(int64_t num_tables, Scratch& s) {
  s.bins.clear();
  s.counts.clear();
  for (int64_t bin = 0; bin < kNumBins / 2; ++bin) {
    const int64_t positive = take(s.tables.data(), num_tables, bin);
    const int64_t negative = take(s.tables.data(), num_tables, bin + kNumBins / 2);
    if (positive + negative == 0) continue;
    s.bins.push_back(static_cast<int32_t>(bin));
    s.counts.push_back(positive);
    s.counts.push_back(negative);
  }
}

}  // namespace

// Counts c by bins; returns how many bins hold something, or -1 when there was no memory.
// gw_histogram_list then lists them, on the same thread.
GW_EXPORT int64_t gw_histogram(const float* grad, float* residual, int64_t n, int threads) {
  try {
    Scratch& s = scratch();
    const int64_t num_tasks = useful_threads(threads, n);
    // To empty a second table is more work than to count a short vector in one.
    const int64_t tables_each = n / num_tasks < kNumBins ? 1 : 2;
    const int64_t num_tables = num_tasks * tables_each;
    if (static_cast<int64_t>(s.tables.size()) < num_tables * kTable) {
      s.tables.resize(static_cast<size_t>(num_tables * kTable));
    }
    uint32_t* const tables = s.tables.data();
    for_each_block(num_tasks, threads, [&](int64_t task) {
      uint32_t* const even = tables + task * tables_each * kTable;
      count_slice(grad, residual, task * n / num_tasks, (task + 1) * n / num_tasks, even,
                  even + (tables_each - 1) * kTable);
    });
    list_bins(num_tables, s);
    return static_cast<int64_t>(s.bins.size());
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

GW_EXPORT void gw_histogram_list(int32_t* bins, int64_t* counts) {
  const Scratch& s = scratch();
  std::copy(s.bins.begin(), s.bins.end(), bins);
  std::copy(s.counts.begin(), s.counts.end(), counts);
}
