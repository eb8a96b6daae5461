// exponents: the exponents of float32 or bfloat16 in codes of a few bits, all other bits as they are.
// Definition: the torch reference in _exponents.py.
//
// What is decoded came over a network, so nothing here trusts it: codes are read in a copy of their
// block, with zeros behind it.
#include <algorithm>
#include <new>
#include <vector>

#include "blocks.h"

namespace {

using namespace gw;

constexpr int64_t kBlock = 4096;
constexpr int kMostBits = 5;
constexpr int64_t kGroup = 8;  // codes, which are as many bytes as a code has bits

// Bytes before the exponents that have no code of their own.
int64_t coded_bytes(int64_t n, int bits) { return (int64_t{1} << bits) + ceil_div(n * bits, 8); }

// Takes eight codes of a word together, from the lowest bits of each byte, and apart again. At each
// stage two neighbours become one, so `singles`, `pairs` and `quads` cover every other of them: a
// mask of all would let a neighbour's bits through where codes are longer than the gaps between them.
struct Masks {
  explicit Masks(int bits) : bits(bits), all(low(8 * bits)), quads(low(4 * bits)), pairs(0), singles(0) {
    for (int at = 0; at < 64; at += 32) pairs |= low(2 * bits) << at;
    for (int at = 0; at < 64; at += 16) singles |= low(bits) << at;
  }
  uint64_t packed(uint64_t x) const {
    x = (x & singles) | (x & ~singles) >> (8 - bits);
    x = (x & pairs) | (x & ~pairs) >> (16 - 2 * bits);
    return (x & quads) | (x & ~quads) >> (32 - 4 * bits);
  }
  uint64_t unpacked(uint64_t x) const {
    x &= all;
    x = (x & quads) | (x & ~quads) << (32 - 4 * bits);
    x = (x & pairs) | (x & ~pairs) << (16 - 2 * bits);
    return (x & singles) | (x & ~singles) << (8 - bits);
  }
  static uint64_t low(int count) { return (uint64_t{1} << count) - 1; }
  int bits;
  uint64_t all, quads, pairs, singles;
};

// Calls work(first element, number of elements) for each group; only the last may be short.
template <class Work>
void for_each_group(int64_t n, const Work& work) {
  int64_t at = 0;
  for (; at + kGroup <= n; at += kGroup) work(at, kGroup);  // a constant, so it is unrolled
  if (at < n) work(at, n - at);
}

// How often each exponent occurs, in the upper bits of `found`, the most frequent first; of equally
// frequent ones the lowest is. Returns how many there are.
int64_t rank(const uint8_t* e, int64_t n, uint32_t* found) {
  uint32_t own[4][256] = {};  // one table would wait for itself where neighbours are equal
  for (int64_t i = 0; i < n; ++i) ++own[i % 4][e[i]];
  int64_t num = 0;
  for (uint32_t v = 0; v < 256; ++v) {
    const uint32_t count = own[0][v] + own[1][v] + own[2][v] + own[3][v];
    if (count) found[num++] = count << 8 | (255 - v);
  }
  std::sort(found, found + num, [](uint32_t a, uint32_t b) { return a > b; });
  return num;
}

// Returns the bytes of the block, at most n, and has room for 16 more.
int64_t encode_block(const uint8_t* e, int64_t n, uint8_t* out) {
  uint32_t ranked[256];
  const int64_t num = rank(e, n, ranked);
  int64_t least = n, own = 0, escaped = n;
  int bits = 0;
  for (int more = 1; more <= kMostBits; ++more) {
    for (; own < min64(num, (1 << more) - 1); ++own) escaped -= ranked[own] >> 8;
    const int64_t size = coded_bytes(n, more) + escaped;
    if (size >= least) continue;
    least = size;
    bits = more;
  }
  if (!bits) {
    std::memcpy(out, e, static_cast<size_t>(n));
    return n;
  }
  const int64_t escape = (1 << bits) - 1;
  uint8_t code[256];
  std::memset(code, static_cast<int>(escape), sizeof code);
  *out = static_cast<uint8_t>(bits);
  for (int64_t i = 0; i < escape; ++i) {
    const uint8_t v = i < num ? static_cast<uint8_t>(255 - (ranked[i] & 255)) : 0;
    if (i < num) code[v] = static_cast<uint8_t>(i);
    out[1 + i] = v;
  }
  uint8_t* to = out + escape + 1;
  uint8_t others[kBlock];
  uint8_t* other = others;
  const Masks masks(bits);
  const uint64_t escapes = static_cast<uint64_t>(escape) * 0x0101010101010101u;
  for_each_group(n, [&](int64_t first, int64_t size) {
    uint64_t word = 0;
    for (int64_t i = 0; i < size; ++i) word |= uint64_t{code[e[first + i]]} << (8 * i);
    // The upper bit of each byte that is `escape`.
    uint64_t found = ~((word ^ escapes) + 0x7f7f7f7f7f7f7f7fu) & 0x8080808080808080u;
    for (; found; found &= found - 1) *other++ = e[first + __builtin_ctzll(found) / 8];
    word = masks.packed(word);
    std::memcpy(to, &word, sizeof word);
    to += bits;
  });
  std::copy(others, other, out + coded_bytes(n, bits));
  return least;
}

// Fills e with the n exponents of a block; false where these bytes are none.
bool decode_block(const uint8_t* coded, int64_t size, int64_t n, uint8_t* e) {
  if (size == n) {
    std::memcpy(e, coded, static_cast<size_t>(n));
    return true;
  }
  const int bits = coded[0];
  if (bits < 1 || bits > kMostBits || coded_bytes(n, bits) > size) return false;
  uint8_t local[2 * kBlock + 16];
  std::memcpy(local, coded, static_cast<size_t>(size));
  std::memset(local + size, 0, kBlock + 16);  // more exponents than there are codes are not asked for
  const uint8_t escape = static_cast<uint8_t>((1 << bits) - 1);
  const uint8_t* from = local + escape + 1;
  int64_t at = coded_bytes(n, bits);
  const Masks masks(bits);
  for_each_group(n, [&](int64_t first, int64_t own) {
    uint64_t word;
    std::memcpy(&word, from, sizeof word);
    word = masks.unpacked(word);
    from += bits;
    for (int64_t i = 0; i < own; ++i, word >>= 8) {
      const uint8_t code = static_cast<uint8_t>(word);
      const bool is_other = code == escape;
      e[first + i] = local[is_other ? at : 1 + code];
      at += is_other;
    }
  });
  return at == size;
}

// By 1 all bits stay, those of NaN as well.
inline float times(float x, float factor) { return factor == 1.0f ? x : x * factor; }

// Cuts values into their exponents and the rest; nothing that is read lies where they write.
template <class Value>
void split(const Value* __restrict in, float factor, int64_t n, uint16_t* __restrict low,
           uint8_t* __restrict rest, uint8_t* __restrict e) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t upper;
    if constexpr (sizeof(Value) == 2) {
      upper = in[i];
    } else {
      const uint32_t bits = bits_of(times(in[i], factor));
      low[i] = static_cast<uint16_t>(bits);
      upper = bits >> 16;
    }
    rest[i] = static_cast<uint8_t>((upper >> 8 & 0x80u) | (upper & 0x7fu));
    e[i] = static_cast<uint8_t>(upper >> 7);
  }
}

template <bool kAdd, class Value>
void join(const uint16_t* __restrict low, const uint8_t* __restrict rest,
          const uint8_t* __restrict e, float factor, int64_t n, Value* __restrict out) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t upper = (rest[i] & 0x80u) << 8 | uint32_t{e[i]} << 7 | (rest[i] & 0x7fu);
    if constexpr (sizeof(Value) == 2) {
      out[i] = static_cast<Value>(upper);
    } else {
      const float x = times(float_of(upper << 16 | low[i]), factor);
      out[i] = kAdd ? out[i] + x : x;
    }
  }
}

}  // namespace

// Fills `low`, `rest`, `sizes` and the front of `codes`, which has room for n bytes; returns how many
// of these it takes. Without `low` the values are of bfloat16, and no factor multiplies them. Every
// block is written where it would lie if all had their most bytes, then all are moved together.
GW_EXPORT int64_t gw_exponents_encode(const void* in, float factor, int64_t n, uint16_t* low,
                                      uint8_t* rest, int32_t* sizes, uint8_t* codes, int threads) {
  const int64_t num_blocks = ceil_div(n, kBlock);
  for_each_block(num_blocks, threads, [&](int64_t b) {
    uint8_t e[kBlock], coded[kBlock + 16];
    const int64_t first = b * kBlock, size = min64(kBlock, n - first);
    if (low) {
      split(static_cast<const float*>(in) + first, factor, size, low + first, rest + first, e);
    } else {
      split(static_cast<const uint16_t*>(in) + first, 1.0f, size, low, rest + first, e);
    }
    sizes[b] = static_cast<int32_t>(encode_block(e, size, coded));
    std::memcpy(codes + first, coded, static_cast<size_t>(sizes[b]));
  });
  int64_t end = 0;
  for (int64_t b = 0; b < num_blocks; ++b) {
    std::memmove(codes + end, codes + b * kBlock, static_cast<size_t>(sizes[b]));
    end += sizes[b];
  }
  return end;
}

// Overwrites `out` with factor times the values, or adds them to it; returns the first block that is
// no code, or -1. Without `low` values and `out` are of bfloat16, and overwritten as they are. -2
// without memory.
GW_EXPORT int64_t gw_exponents_decode(const uint16_t* low, const uint8_t* rest,
                                      const int32_t* sizes, const uint8_t* codes,
                                      int64_t num_coded, int64_t n, void* out, float factor,
                                      int add, int threads) try {
  const int64_t num_blocks = ceil_div(n, kBlock);
  std::vector<int64_t> starts{0};
  for (int64_t b = 0; b < num_blocks; ++b) {
    if (sizes[b] < 1 || sizes[b] > min64(kBlock, n - b * kBlock)) return b;
    starts.push_back(starts.back() + sizes[b]);
  }
  if (starts.back() != num_coded) return num_blocks - 1;
  std::vector<uint8_t> right(static_cast<size_t>(num_blocks));
  for_each_block(num_blocks, threads, [&](int64_t b) {
    uint8_t e[kBlock];
    const int64_t first = b * kBlock, size = min64(kBlock, n - first);
    const size_t at = static_cast<size_t>(b);
    right[at] = decode_block(codes + starts[at], sizes[b], size, e);
    if (!right[at]) return;
    if (!low) {
      join<false>(low, rest + first, e, 1.0f, size, static_cast<uint16_t*>(out) + first);
    } else {
      const auto put = add ? join<true, float> : join<false, float>;
      put(low + first, rest + first, e, factor, size, static_cast<float*>(out) + first);
    }
  });
  const auto wrong = std::find(right.begin(), right.end(), uint8_t{0});
  return wrong == right.end() ? -1 : wrong - right.begin();
} catch (const std::bad_alloc&) {
  return -2;
}
