// The 8-bit floats of e4m3.py: bit arithmetic without a branch, so that a loop of it is a vector.
#pragma once

#include "scalars.h"

namespace gw {

constexpr int32_t kE4m3Shift = 20;               // a float32 has 23 bits of fraction, a code has 3
constexpr int32_t kE4m3Bias = (127 - 7) << 3;    // the biases' difference, above such a fraction
constexpr int32_t kE4m3Most = 0x43E00000;        // 448
constexpr int32_t kE4m3LeastNormal = 0x3C800000; // 2^-6
constexpr int32_t kInfinity = 0x7F800000;

inline int32_t to_e4m3(float x) {
  const int32_t magnitude = bits_of(x) & 0x7FFFFFFF;
  const int32_t sign = bits_of(x) >> 24 & 0x80;
  const int32_t inside = magnitude < kE4m3Most ? magnitude : kE4m3Most;
  const int32_t half = 0x7FFFF + (inside >> kE4m3Shift & 1);  // ties go to even
  const int32_t normal = ((inside + half) >> kE4m3Shift) - kE4m3Bias;
  // Beside 2^14 the last place of a float32 is 2^-9, the unit of the codes below 8.
  const int32_t small = bits_of(float_of(inside) + 16384.0f) - bits_of(16384.0f);
  const int32_t code = (inside < kE4m3LeastNormal ? small : normal) | sign;
  return magnitude > kInfinity ? 0x7F : code;
}

inline float from_e4m3(int32_t code) {
  const int32_t magnitude = code & 0x7F;
  const int32_t normal = (magnitude + kE4m3Bias) << kE4m3Shift;
  const int32_t small = bits_of(static_cast<float>(magnitude) * 0x1p-9f);
  const int32_t bits = (magnitude < 8 ? small : normal) | (code & 0x80) << 24;
  return magnitude == 0x7F ? std::numeric_limits<float>::quiet_NaN() : float_of(bits);
}

}  // namespace gw
