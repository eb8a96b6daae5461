// Norms of ranges. Definition: the torch reference in magnitudes.py.
#include <algorithm>
#include <new>
#include <vector>

#include "blocks.h"

namespace {

using namespace gw;

constexpr int64_t kNormBlock = 8192;  // elements that are added before their sum is
constexpr int kNumLanes = 16;

// Buffers that live as long as the calling thread.
struct Scratch {
  std::vector<int64_t> ends;
  std::vector<double> sums;
};

Scratch& scratch() {
  thread_local Scratch buffers;
  return buffers;
}

void accumulate(const float* g, float* r, int64_t n) {
  for (int64_t i = 0; i < n; ++i) r[i] = g[i] + r[i];
}

// Lane i % 16 adds the squares of its elements in turn; then the lanes are added in turn. A
// float's square is exact in a double, so no machine rounds it otherwise.
double sum_squares(const float* g, float* r, int64_t n) {
  if (r) accumulate(g, r, n);
  const float* const c = r ? r : g;
  double lanes[kNumLanes] = {};
  int64_t i = 0;
  for (; i + kNumLanes <= n; i += kNumLanes) {
    prefetch_ahead(c + i);
    for (int lane = 0; lane < kNumLanes; ++lane) {
      const double x = c[i + lane];
      lanes[lane] += x * x;
    }
  }
  for (int lane = 0; i < n; ++i, ++lane) lanes[lane] += static_cast<double>(c[i]) * c[i];
  double sum = 0.0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

}  // namespace

// Squared norms of ranges, the same bits whatever the threads. Returns 1 when there was no memory.
GW_EXPORT int gw_range_norms(const float* grad, float* residual, const int64_t* starts,
                             const int64_t* stops, int64_t num_ranges, double* norms,
                             int threads) {
  try {
    Scratch& s = scratch();
    s.ends.resize(static_cast<size_t>(num_ranges));
    int64_t num_blocks = 0;
    for (int64_t i = 0; i < num_ranges; ++i) {
      num_blocks += ceil_div(stops[i] - starts[i], kNormBlock);
      s.ends[static_cast<size_t>(i)] = num_blocks;
    }
    s.sums.resize(static_cast<size_t>(num_blocks));
    const int64_t* const ends = s.ends.data();
    double* const sums = s.sums.data();
    for_each_block(num_blocks, threads, [&](int64_t block) {
      const int64_t i = std::upper_bound(ends, ends + num_ranges, block) - ends;
      const int64_t first = starts[i] + (block - (i ? ends[i - 1] : 0)) * kNormBlock;
      const int64_t size = min64(kNormBlock, stops[i] - first);
      sums[block] = sum_squares(grad + first, residual ? residual + first : nullptr, size);
    });
    for (int64_t i = 0; i < num_ranges; ++i) {
      norms[i] = 0.0;
      for (int64_t block = i ? ends[i - 1] : 0; block < ends[i]; ++block) norms[i] += sums[block];
    }
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
