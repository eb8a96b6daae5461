// The bijection of kernels/sparse/permutation.py.
#pragma once

#include "blocks.h"

namespace gw {

constexpr int kRounds = 3;

// Words are mapped in groups, all lanes of a group together, until the last is inside: fewer lanes
// would mean more branches that cannot be foretold, more lanes more turns for the last.
constexpr int kLanes = 32;

struct Permutation {
  uint32_t numel, mask, shift;
  uint32_t multiplier[kRounds], addend[kRounds], inverse[kRounds];

  // numel, mask, shift, then multiplier, addend and inverse of each round.
  explicit Permutation(const uint32_t* given) : numel(given[0]), mask(given[1]), shift(given[2]) {
    for (int i = 0; i < kRounds; ++i) {
      multiplier[i] = given[3 + 3 * i];
      addend[i] = given[4 + 3 * i];
      inverse[i] = given[5 + 3 * i];
    }
  }

  template <bool kInverse>
  uint32_t once(uint32_t x) const {
#pragma GCC unroll 3
    for (int i = 0; i < kRounds; ++i) {
      if (kInverse) {
        x = ((x - addend[kRounds - 1 - i]) * inverse[kRounds - 1 - i]) & mask;
        x ^= x >> shift;
      } else {
        x ^= x >> shift;
        x = (x * multiplier[i] + addend[i]) & mask;
      }
    }
    return x;
  }

  // In place; every word is below numel.
  template <bool kInverse>
  void map(uint32_t* words, int64_t count) const {
    const Permutation own = *this;  // words could lie in *this, for all that the compiler knows
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) own.map_group<kInverse>(words + i);
    if (i == count) return;
    uint32_t rest[kLanes] = {};
    std::memcpy(rest, words + i, static_cast<size_t>(count - i) * sizeof(uint32_t));
    own.map_group<kInverse>(rest);
    std::memcpy(words + i, rest, static_cast<size_t>(count - i) * sizeof(uint32_t));
  }

 private:
  template <bool kInverse>
  void map_group(uint32_t* words) const {
    for (int lane = 0; lane < kLanes; ++lane) words[lane] = once<kInverse>(words[lane]);
    for (;;) {
      uint32_t outside = 0;
      for (int lane = 0; lane < kLanes; ++lane) outside |= words[lane] >= numel;
      if (!outside) return;
      for (int lane = 0; lane < kLanes; ++lane) {
        const uint32_t next = once<kInverse>(words[lane]);
        words[lane] = words[lane] >= numel ? next : words[lane];
      }
    }
  }
};

// The position of the first index outside [0, bound), or -1.
inline int64_t find_outside(const int32_t* indices, int64_t count, int64_t bound) {
  const uint32_t end = static_cast<uint32_t>(bound);
  uint32_t any = 0;
  for (int64_t i = 0; i < count; ++i) any |= static_cast<uint32_t>(indices[i]) >= end;
  if (!any) return -1;
  int64_t i = 0;
  while (static_cast<uint32_t>(indices[i]) < end) ++i;
  return i;
}

}  // namespace gw
