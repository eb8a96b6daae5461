// The k-th largest key among values, exactly, by narrowing: each pass over them keeps what lies
// between two pivots, so that all passes together read little more than the first.
#pragma once

#include <algorithm>
#include <vector>

#include "blocks.h"

namespace gw {

constexpr uint32_t kInfKey = 0x7f800000u;
constexpr uint32_t kMaxKey = 0x7fffffffu;
constexpr int64_t kFew = 64;     // of so few each is compared with all
constexpr int kMaxRounds = 64;   // hostile values may cost more, if not much more
constexpr int64_t kLanes = 16;

// What elements are ranked by: the bit pattern without the sign.
inline uint32_t key_of(float x) { return bits_of(x) & 0x7fffffffu; }

// Waking a thread for less than this costs more than it saves.
inline int useful_threads(int threads, int64_t num_elements) {
  return static_cast<int>(min64(threads, num_elements / (int64_t{1} << 19) + 1));
}

struct Cut {
  uint32_t key;      // the k-th largest
  int64_t num_ties;  // how many elements of that very key are selected
};

// Buffers for what is kept, each other round in the other one.
struct Kept {
  std::vector<float> values[2];

  void reserve(int64_t n) {
    if (static_cast<int64_t>(values[0].size()) >= n + kLanes) return;
    for (std::vector<float>& buffer : values) buffer.resize(static_cast<size_t>(n + kLanes));
  }
};

// Keys that are wanted, both ends included.
struct Band {
  uint32_t low;
  uint32_t high;
};

struct Split {
  int64_t num_above;
  int64_t num_kept;
};

// Copies what lies in the band, in order, and counts what lies above it. Up to kLanes values behind
// the last that is kept are overwritten.
inline Split split(const float* from, int64_t n, Band band, float* to) {
  Split found = {0, 0};
  int64_t i = 0;
#ifdef GW_AVX512
  const __m512i low = _mm512_set1_epi32(static_cast<int>(band.low));
  const __m512i high = _mm512_set1_epi32(static_cast<int>(band.high));
  const __m512i no_sign = _mm512_set1_epi32(0x7fffffff);
  for (; i + kLanes <= n; i += kLanes) {
    prefetch_ahead(from + i);
    const __m512i bits = _mm512_loadu_si512(from + i);
    const __m512i key = _mm512_and_si512(bits, no_sign);
    const __mmask16 above = _mm512_cmpgt_epi32_mask(key, high);
    const __mmask16 kept = _mm512_mask_cmpge_epi32_mask(_knot_mask16(above), key, low);
    _mm512_storeu_si512(to + found.num_kept, _mm512_maskz_compress_epi32(kept, bits));
    found.num_kept += __builtin_popcount(kept);
    found.num_above += __builtin_popcount(above);
  }
#endif
  for (; i < n; ++i) {
    const uint32_t key = key_of(from[i]);
    to[found.num_kept] = from[i];
    found.num_above += key > band.high;
    found.num_kept += (key >= band.low) & (key <= band.high);
  }
  return found;
}

// The cut among at most kFew keys, filled up with what counts for none.
inline Cut cut_of_few(const int32_t (&keys)[kFew], int64_t n, int64_t k) {
  for (int64_t i = 0; i < n; ++i) {
    int32_t num_above = 0, num_equal = 0;
    for (const int32_t other : keys) {
      num_above += other > keys[i];
      num_equal += other == keys[i];
    }
    if (num_above < k && k <= num_above + num_equal) {
      return {static_cast<uint32_t>(keys[i]), k - num_above};
    }
  }
  return {0, 0};  // k is in [1, n], so one of them was it
}

// Keys around the k-th of n > kFew, by kFew of them; with `one` a single key close to it.
inline Band pivots(const float* from, int64_t n, int64_t k, int round, bool one) {
  int32_t keys[kFew];
  const int64_t stride = n / kFew;
  const float* const first = from + round % stride;
  for (int64_t i = 0; i < kFew; ++i) keys[i] = static_cast<int32_t>(key_of(first[i * stride]));
  const double share = static_cast<double>(k) / static_cast<double>(n);
  const double rank = share * kFew;
  if (one) {
    const int64_t nearest = min64(static_cast<int64_t>(rank) + 1, kFew);
    const uint32_t key = cut_of_few(keys, kFew, nearest).key;
    return {key, key};
  }
  const double margin = 1.0 + 1.5 * __builtin_sqrt(rank * (1.0 - share));
  const int64_t below = static_cast<int64_t>(rank + margin) + 1;
  const int64_t above = static_cast<int64_t>(rank < margin ? 0.0 : rank - margin);
  return {below > kFew ? 0 : cut_of_few(keys, kFew, below).key,
          above < 1 ? kMaxKey : cut_of_few(keys, kFew, above).key};
}

// By the library's quickselect, where narrowing does not come to an end.
inline Cut cut_of_many(const float* from, int64_t n, int64_t k, float* buffer) {
  std::copy(from, from + n, buffer);
  std::nth_element(buffer, buffer + k - 1, buffer + n,
                   [](float a, float b) { return key_of(a) > key_of(b); });
  const uint32_t key = key_of(buffer[k - 1]);
  for (int64_t i = 0; i < n; ++i) k -= key_of(from[i]) > key;
  return {key, k};
}

// The cut that takes the k largest of n values.
inline Cut find_cut(const float* from, int64_t n, int64_t k, Kept& buffers) {
  if (k == 0) return {kMaxKey, 0};
  buffers.reserve(n);
  bool one = false;
  for (int round = 0; n > kFew; ++round) {
    float* const to = buffers.values[round % 2].data();
    if (round == kMaxRounds) return cut_of_many(from, n, k, to);
    const Band band = pivots(from, n, k, round, one);
    Split found = split(from, n, band, to);
    if (k <= found.num_above) {
      found = split(from, n, {band.high + 1, kMaxKey}, to);
    } else if (k > found.num_above + found.num_kept) {
      k -= found.num_above + found.num_kept;
      found = split(from, n, {0, band.low - 1}, to);
    } else {
      k -= found.num_above;
      if (band.low == band.high) return {band.low, k};
    }
    one = 2 * found.num_kept > n;
    n = found.num_kept;
    from = to;
  }
  int32_t keys[kFew];
  for (int64_t i = 0; i < kFew; ++i) keys[i] = i < n ? static_cast<int32_t>(key_of(from[i])) : -1;
  return cut_of_few(keys, n, k);
}

}  // namespace gw
