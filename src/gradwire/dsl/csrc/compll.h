// What generated kernels are made of: groups of 64 elements, lanes, packing, casts, Philox.
//
// Every function here has its definition in Python: interp.py (reductions, casts, packing) and
// philox.py. Loops over the 64 elements of a group have no branch, so that the compiler makes
// vectors of whatever width the machine has. Neither <cmath> nor <immintrin.h> is included: reading
// them takes longer than compiling a kernel.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#define GW_EXPORT extern "C" __attribute__((visibility("default")))
#define GW_INLINE __attribute__((always_inline))

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire layouts are little-endian");

namespace gw {

constexpr int kLanes = 64;                // elements of a group, partial results of a reduction
constexpr int64_t kRun = 16384;           // elements that a thread takes at least
constexpr int64_t kPrefetchBytes = 4096;  // the hardware's own prefetch stops at every page

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

// Calls work(block, its first element, its length) for every block, in any order. Threads take
// short blocks several at a time: asking for one costs more than computing it.
template <class Work>
void for_each_block(int64_t length, int64_t num_elements, int threads, const Work& work) {
  const int64_t num_blocks = ceil_div(num_elements, length);
  const int64_t run = ceil_div(kRun, length);
  const int64_t num_runs = ceil_div(num_blocks, run);
  if (threads > num_runs) threads = static_cast<int>(num_runs);
  if (threads < 1) threads = 1;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t number = 0; number < num_runs; ++number) {
    const int64_t end = min64((number + 1) * run, num_blocks);
    for (int64_t block = number * run; block < end; ++block) {
      work(block, block * length, min64(length, num_elements - block * length));
    }
  }
}

// Calls work(first element, number of elements) for each group; only the last may be short. The
// full ones see a constant, from which the compiler makes straight-line vector code.
template <class Work>
inline void for_each_group(int64_t num_elements, const Work& work) {
  int64_t at = 0;
  for (; at + kLanes <= num_elements; at += kLanes) work(at, kLanes);
  if (at < num_elements) work(at, static_cast<int>(num_elements - at));
}

// Fetches ahead of a linear read; an address past the end of a vector does no harm. Inlined by
// force: as a function it has no effect that the compiler knows of, and calls of it are dropped.
inline GW_INLINE void prefetch_group(const float* at) {
  for (int line = 0; line < kLanes; line += 16) {
    __builtin_prefetch(reinterpret_cast<const char*>(at + line) + kPrefetchBytes, 0, 2);
  }
}

// ---- scalar functions -------------------------------------------------------------------------

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

// The lanes combined, by halves: the order is part of the result.
template <class Result, class T, class Combine>
inline Result folded(T (&lane)[kLanes], const Combine& combine) {
  for (int half = kLanes / 2; half; half /= 2) {
    for (int j = 0; j < half; ++j) lane[j] = combine(lane[j], lane[j + half]);
  }
  return canonical(static_cast<Result>(lane[0]));
}

// ---- packing: code i of k bits lies at bit k * i ------------------------------------------------

// A group's 64 codes, one a byte: eight words of 64 bits, in one vector all the way from the loop
// that makes them to the bytes that travel. (A wide load after narrow stores waits for the cache.)
typedef uint64_t Words __attribute__((vector_size(64)));

// What a word of eight codes shrinks to, and eight of those.
template <int kBits> struct Packed;
template <> struct Packed<1> { typedef uint8_t Eight __attribute__((vector_size(8))); };
template <> struct Packed<2> { typedef uint16_t Eight __attribute__((vector_size(16))); };
template <> struct Packed<4> { typedef uint32_t Eight __attribute__((vector_size(32))); };
template <> struct Packed<8> { typedef Words Eight; };

constexpr uint64_t every(int width, int ones) {  // `ones` low bits set in each `width` bits
  uint64_t mask = 0;
  for (int at = 0; at < 64; at += width) mask |= ((uint64_t{1} << ones) - 1) << at;
  return mask;
}

inline size_t packed_bytes(int count, int bits) {
  return static_cast<size_t>((count * bits + 7) / 8);
}

// Packs the first `count` of a group's codes; those behind them are 0.
template <int kBits>
inline GW_INLINE void pack(const uint8_t (&code)[kLanes], uint8_t* out, int count) {
  Words x;
  std::memcpy(&x, code, sizeof x);
  x = (x | x >> (8 - kBits)) & every(16, 2 * kBits);
  x = (x | x >> (16 - 2 * kBits)) & every(32, 4 * kBits);
  x = x | x >> (32 - 4 * kBits);
  const auto narrow = __builtin_convertvector(x, typename Packed<kBits>::Eight);
  std::memcpy(out, &narrow, packed_bytes(count, kBits));
}

template <int kBits>
inline GW_INLINE void unpack(const uint8_t* in, uint8_t (&code)[kLanes], int count) {
  typename Packed<kBits>::Eight narrow = {};
  std::memcpy(&narrow, in, packed_bytes(count, kBits));
  Words x = __builtin_convertvector(narrow, Words);
  x = (x | x << (32 - 4 * kBits)) & every(32, 4 * kBits);
  x = (x | x << (16 - 2 * kBits)) & every(16, 2 * kBits);
  x = (x | x << (8 - kBits)) & every(8, kBits);
  std::memcpy(code, &x, sizeof x);
}

// ---- random numbers ---------------------------------------------------------------------------

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

// A multiple of 2^-24 in [0, 1).
inline float uniform(uint32_t word) {
  return static_cast<float>(static_cast<int32_t>(word >> 8)) * 0x1p-24f;
}

}  // namespace gw
