// What every kernel file shares: the export macro, the fixed block partition.
//
// Results must not depend on the number of threads, so work is cut into blocks whose size depends
// on the data alone; threads only decide who computes a block, never what is in it.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define GW_AVX512 1
#endif
#if defined(GW_AVX512) || defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

#define GW_EXPORT extern "C" __attribute__((visibility("default")))

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire layouts are little-endian");

namespace gw {

// Calls work(block, next): next is the block this thread computes after it, or num_blocks.
// Blocks are claimed one ahead, so that a block can prefetch its successor.
template <class Work>
void for_each_block(int64_t num_blocks, int threads, const Work& work) {
  if (threads > num_blocks) threads = static_cast<int>(num_blocks);
  if (threads < 1) threads = 1;
  std::atomic<int64_t> unclaimed{0};
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    int64_t block = unclaimed.fetch_add(1, std::memory_order_relaxed);
    while (block < num_blocks) {
      const int64_t next = unclaimed.fetch_add(1, std::memory_order_relaxed);
      work(block, next < num_blocks ? next : num_blocks);
      block = next;
    }
  }
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

}  // namespace gw
