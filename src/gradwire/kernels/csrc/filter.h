// One pass over memory that collects what reaches a threshold.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "blocks.h"
#include "cut.h"

namespace gw {

constexpr int64_t kBlock = 16384;  // elements of a block; its candidates fit a local buffer

// Where candidates lie between the pass that finds them and the one that lists them.
struct Pool {
  std::vector<float> values;
  std::vector<int32_t> indices;

  void reserve(int64_t capacity) {
    if (static_cast<int64_t>(values.size()) >= capacity) return;
    values.resize(static_cast<size_t>(capacity));
    indices.resize(static_cast<size_t>(capacity));
  }
};

struct LocalBuffer {
  float values[kBlock + 16];
  int32_t indices[kBlock + 16];
};

inline LocalBuffer& local_buffer() {
  thread_local std::unique_ptr<LocalBuffer> buffer(new LocalBuffer);
  return *buffer;
}

// Collects a block's elements whose key reaches the threshold; with kAccumulate r = g + r first.
template <bool kAccumulate>
int64_t filter_block(const float* g, float* r, int64_t n, int64_t first, uint32_t threshold,
                     LocalBuffer& out) {
  int64_t count = 0;
  int64_t i = 0;
#ifdef GW_AVX512
  const __m512i bound = _mm512_set1_epi32(static_cast<int>(threshold));
  const __m512i no_sign = _mm512_set1_epi32(0x7fffffff);
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i index = _mm512_add_epi32(lane, _mm512_set1_epi32(static_cast<int>(first)));
  for (; i + 16 <= n; i += 16) {
    __m512 c = _mm512_loadu_ps(g + i);
    prefetch_ahead(g + i);
    if (kAccumulate) {
      prefetch_ahead(r + i);
      c = _mm512_add_ps(c, _mm512_loadu_ps(r + i));
      _mm512_storeu_ps(r + i, c);
    }
    const __m512i key = _mm512_and_si512(_mm512_castps_si512(c), no_sign);
    const __mmask16 pass = _mm512_cmpge_epi32_mask(key, bound);
    _mm512_storeu_ps(out.values + count, _mm512_maskz_compress_ps(pass, c));
    _mm512_storeu_si512(out.indices + count, _mm512_maskz_compress_epi32(pass, index));
    count += __builtin_popcount(pass);
    index = _mm512_add_epi32(index, _mm512_set1_epi32(16));
  }
#endif
  for (; i < n; ++i) {
    const float c = kAccumulate ? g[i] + r[i] : g[i];
    if (kAccumulate) r[i] = c;
    out.values[count] = c;
    out.indices[count] = static_cast<int32_t>(first + i);
    count += key_of(c) >= threshold;
  }
  return count;
}

// What a pass reads: c = g, or c = g + r, which it leaves in r.
struct Operands {
  const float* g;
  float* r;
  int64_t n;
  int threads;
};

// Lists what reaches the threshold, a part for each block; returns how much that is. What is beyond
// the capacity is not listed: the parts are void then.
inline int64_t filter(const Operands& c, uint32_t threshold, int64_t capacity, Pool& pool,
                      std::vector<Part>& parts) {
  const int64_t num_blocks = ceil_div(c.n, kBlock);
  pool.reserve(capacity);
  parts.resize(static_cast<size_t>(num_blocks));
  std::atomic<int64_t> used{0};
  for_each_block(num_blocks, c.threads, [&](int64_t b) {
    LocalBuffer& local = local_buffer();
    const int64_t first = b * kBlock;
    const int64_t size = min64(kBlock, c.n - first);
    const int64_t count =
        c.r ? filter_block<true>(c.g + first, c.r + first, size, first, threshold, local)
            : filter_block<false>(c.g + first, nullptr, size, first, threshold, local);
    // The place in the pool depends on timing, the order of the parts does not.
    const int64_t place = used.fetch_add(count, std::memory_order_relaxed);
    if (place + count > capacity) return;
    float* const values = pool.values.data() + place;
    int32_t* const indices = pool.indices.data() + place;
    std::memcpy(values, local.values, static_cast<size_t>(count) * sizeof(float));
    std::memcpy(indices, local.indices, static_cast<size_t>(count) * sizeof(int32_t));
    parts[static_cast<size_t>(b)] = {values, indices, count, 0};
  });
  return used.load();
}

}  // namespace gw
