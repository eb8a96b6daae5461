// The exponents of exponent.py: bits that are moved, without a branch.
#pragma once

#include "scalars.h"

namespace gw {

inline int32_t exponent(float x) { return (bits_of(x) >> 23 & 0xFF) - 127; }

inline float exp2(int32_t n) {
  const int32_t inside = n < -127 ? -127 : n > 128 ? 128 : n;
  return float_of((inside + 127) << 23);
}

}  // namespace gw
