// What every kernel file shares: the export macro, the fixed block partition.
//
// Results must not depend on the number of threads, so work is cut into blocks whose size depends
// on the data alone; threads only decide who computes a block, never what is in it.
#pragma once

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

// Calls work(block) for every block, in any order.
template <class Work>
void for_each_block(int64_t num_blocks, int threads, const Work& work) {
  if (threads > num_blocks) threads = static_cast<int>(num_blocks);
  if (threads <= 1) {  // entering a parallel region takes half a microsecond, even of one thread
    for (int64_t block = 0; block < num_blocks; ++block) work(block);
    return;
  }
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t block = 0; block < num_blocks; ++block) work(block);
}

// Fetches ahead of a linear read: the hardware's own prefetch stops at every page. An address past
// the end of a vector does no harm.
constexpr int64_t kPrefetchBytes = 4096;

inline void prefetch_ahead(const float* at) {
  __builtin_prefetch(reinterpret_cast<const char*>(at) + kPrefetchBytes, 0, 2);
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// Infinities and NaN become 0.
inline float finite_or_zero(float x) {
  return (bits_of(x) & 0x7f800000u) == 0x7f800000u ? 0.0f : x;
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

}  // namespace gw
