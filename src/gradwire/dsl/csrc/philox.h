// Random numbers: Philox 4x32-7, as defined in philox.py.
#pragma once

#include "blocks.h"

namespace gw {

constexpr int kRounds = 7;

// The numbers of one call: Philox's key for each round, and the part of the counter they share.
struct Draws {
  uint64_t step;
  uint64_t low[kRounds];
  uint64_t high[kRounds];

  Draws(uint64_t key, uint64_t call_step) : step(call_step) {
    for (uint32_t round = 0; round < kRounds; ++round) {
      low[round] = static_cast<uint32_t>(key) + round * 0x9E3779B9u;
      high[round] = static_cast<uint32_t>(key >> 32) + round * 0xBB67AE85u;
    }
  }
};

// Wide: several counters' words side by side, one in the low half of each 64 bits; the high halves
// hold anything, as the widening multiplication of vectors wants it. Written as an operator, that
// multiplication becomes a full 64-bit one, which takes three times as long.
#if defined(__AVX512F__)
typedef uint64_t Wide __attribute__((vector_size(64)));
#elif defined(__AVX2__)
typedef uint64_t Wide __attribute__((vector_size(32)));
#else
typedef uint64_t Wide __attribute__((vector_size(16)));
#endif
constexpr int kWide = sizeof(Wide) / sizeof(uint64_t);
constexpr uint64_t kLow = 0xFFFFFFFFu;

inline GW_INLINE Wide product(Wide x, uint64_t y) {
#if defined(__AVX2__)
  Wide z;
  asm("vpmuludq %2, %1, %0" : "=v"(z) : "v"(x), "v"(Wide{} + y));
  return z;
#else
  return (x & kLow) * y;
#endif
}

struct Counters {
  Wide a, b, c, d;

  inline GW_INLINE void round(uint64_t low, uint64_t high) {
    const Wide first = product(a, 0xD2511F53u);
    const Wide second = product(c, 0xCD9E8D57u);
    a = (second >> 32) ^ b ^ low;
    b = second;
    c = (first >> 32) ^ d ^ high;
    d = first;
  }
};

// Words of even and of odd counters, in order.
inline GW_INLINE void store_words(uint32_t* to, Wide even, Wide odd) {
  const Wide words = (even & kLow) | odd << 32;
  std::memcpy(to, &words, sizeof words);
}

// Philox 4x32-7 for the 64 elements of group `group`: 16 counters of four words each.
inline GW_INLINE void philox(const Draws& draws, uint32_t stream, int64_t group,
                             uint32_t (&word)[kLanes]) {
  Wide evens;
  for (int i = 0; i < kWide; ++i) evens[i] = static_cast<uint64_t>(2 * i);
  for (int i = 0; i < 16; i += 2 * kWide) {
    const Wide counter = evens + static_cast<uint64_t>(16 * group + i);
    Counters even{counter, counter >> 32, Wide{} + draws.step, Wide{} + stream};
    Counters odd{counter + 1, counter >> 32, Wide{} + draws.step, Wide{} + stream};
    for (int round = 0; round < kRounds; ++round) {
      even.round(draws.low[round], draws.high[round]);
      odd.round(draws.low[round], draws.high[round]);
    }
    store_words(word + i, even.a, odd.a);
    store_words(word + 16 + i, even.b, odd.b);
    store_words(word + 32 + i, even.c, odd.c);
    store_words(word + 48 + i, even.d, odd.d);
  }
}

// A whole number in [0, bound).
inline int32_t below(uint32_t word, int32_t bound) {
  return static_cast<int32_t>(uint64_t{word} * static_cast<uint32_t>(bound) >> 32);
}

// A multiple of 2^-24 in [0, 1).
inline float uniform(uint32_t word) {
  return static_cast<float>(static_cast<int32_t>(word >> 8)) * 0x1p-24f;
}

}  // namespace gw
