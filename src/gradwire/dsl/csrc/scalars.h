// What is computed with one element, and how elements are reduced.
#pragma once

#include <limits>

#include "blocks.h"

namespace gw {

template <class T>
inline T smaller(T a, T b) { return (a < b) | (a != a) ? a : b; }
template <class T>
inline T greater(T a, T b) { return (a > b) | (a != a) ? a : b; }
inline float abs(float x) { return __builtin_fabsf(x); }
inline int32_t abs(int32_t x) { return x < 0 ? -x : x; }
inline float floor(float x) { return __builtin_floorf(x); }
inline float round(float x) { return __builtin_nearbyintf(x); }  // halves to even
inline float sqrt(float x) { return __builtin_sqrtf(x); }
inline bool finite(float x) { return abs(x) <= std::numeric_limits<float>::max(); }

inline int32_t bits_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// One zero and one NaN, whatever order of operations they came from.
inline float canonical(float x) {
  return x == x ? x + 0.0f : std::numeric_limits<float>::quiet_NaN();
}
inline int32_t canonical(int32_t x) { return x; }

// Towards zero, saturating; NaN becomes 0.
template <int kTop>
inline int32_t to_uint(float x) {
  const float low = x > 0.0f ? x : 0.0f;
  return static_cast<int32_t>(low < static_cast<float>(kTop) ? low : static_cast<float>(kTop));
}
template <int kTop>
inline int32_t to_uint(int32_t x) {
  const int32_t low = x > 0 ? x : 0;
  return low < kTop ? low : kTop;
}
template <int kTop>
inline int32_t to_uint(bool x) { return x; }

inline int32_t to_int(float x) {
  const float high = 2147483520.0f;  // the last float32 below 2^31
  const float inside = x > -2147483648.0f ? (x < high ? x : high) : -2147483648.0f;
  const int32_t whole = static_cast<int32_t>(x == x ? inside : 0.0f);
  return x >= 2147483648.0f ? std::numeric_limits<int32_t>::max() : whole;
}
inline int32_t to_int(int32_t x) { return x; }
inline int32_t to_int(bool x) { return x; }

// ---- reductions -------------------------------------------------------------------------------

// Lane j with lane j + kHalf, and so on down to one lane. Every length is a constant, so that the
// compiler makes vectors as long as the lanes allow.
template <int kHalf, class T, class Combine>
inline GW_INLINE void halve(T (&lane)[kLanes], const Combine& combine) {
#pragma omp simd
  for (int j = 0; j < kHalf; ++j) lane[j] = combine(lane[j], lane[j + kHalf]);
  if constexpr (kHalf > 1) halve<kHalf / 2>(lane, combine);
}

// The lanes combined, by halves: the order is part of the result.
template <class Result, class T, class Combine>
inline Result folded(T (&lane)[kLanes], const Combine& combine) {
  halve<kLanes / 2>(lane, combine);
  return canonical(static_cast<Result>(lane[0]));
}

}  // namespace gw
