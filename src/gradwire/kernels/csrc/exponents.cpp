// exponents: the exponents of float32 or bfloat16 in prefix codes of each block, all other bits as
// they are. Definition: the torch reference in exponents.py.
#include <algorithm>
#include <new>
#include <vector>

#include "prefix.h"

namespace {

using namespace gw;

inline uint8_t other_bits(uint32_t upper) { return (upper >> 8 & 0x80u) | (upper & 0x7fu); }

inline uint32_t upper_bits(uint8_t rest, uint8_t e) {
  return (rest & 0x80u) << 8 | static_cast<uint32_t>(e) << 7 | (rest & 0x7fu);
}

// Cut values into their exponents and the rest; nothing that is read lies where they write.
struct Float32 {
  const float* in;
  uint16_t* low;
  uint8_t* rest;
  float factor;

  template <class Value>
  static void cut(const float* __restrict in, int64_t n, uint16_t* __restrict low,
                  uint8_t* __restrict rest, uint8_t* __restrict e, const Value& value) {
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t bits = bits_of(value(in[i]));
      low[i] = static_cast<uint16_t>(bits);
      rest[i] = other_bits(bits >> 16);
      e[i] = static_cast<uint8_t>(bits >> 23);
    }
  }
  void split(int64_t first, int64_t n, uint8_t* e) const {
    const float by = factor;
    if (by == 1.0f) {  // NaN's bits stay as well
      cut(in + first, n, low + first, rest + first, e, [](float x) { return x; });
    } else {
      cut(in + first, n, low + first, rest + first, e, [by](float x) { return x * by; });
    }
  }
};

struct Bfloat16 {
  const uint16_t* in;
  uint8_t* rest;

  static void cut(const uint16_t* __restrict in, int64_t n, uint8_t* __restrict rest,
                  uint8_t* __restrict e) {
    for (int64_t i = 0; i < n; ++i) {
      rest[i] = other_bits(in[i]);
      e[i] = static_cast<uint8_t>(in[i] >> 7);
    }
  }
  void split(int64_t first, int64_t n, uint8_t* e) const { cut(in + first, n, rest + first, e); }
};

template <class Put>
void join(const uint16_t* __restrict low, const uint8_t* __restrict rest,
          const uint8_t* __restrict e, int64_t n, float* __restrict out, const Put& put) {
  if (low) {
    for (int64_t i = 0; i < n; ++i) {
      put(out[i], float_of(upper_bits(rest[i], e[i]) << 16 | low[i]));
    }
  } else {
    for (int64_t i = 0; i < n; ++i) put(out[i], float_of(upper_bits(rest[i], e[i]) << 16));
  }
}

void join16(const uint8_t* __restrict rest, const uint8_t* __restrict e, int64_t n,
            uint16_t* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<uint16_t>(upper_bits(rest[i], e[i]));
}

// Every block is written where it would lie if all had their most bytes, then all are moved together.
template <class Values>
int64_t encode(const Values& values, int64_t n, int32_t* sizes, uint8_t* codes, int threads) {
  const int64_t num_blocks = ceil_div(n, kBlock);
  for_each_block(num_blocks, threads, [&](int64_t b) {
    uint8_t e[kBlock], coded[kBlock + 16];
    const int64_t size = min64(kBlock, n - b * kBlock);
    values.split(b * kBlock, size, e);
    sizes[b] = static_cast<int32_t>(encode_block(e, size, coded));
    std::memcpy(codes + b * kBlock, coded, static_cast<size_t>(sizes[b]));
  });
  int64_t end = 0;
  for (int64_t b = 0; b < num_blocks; ++b) {
    std::memmove(codes + end, codes + b * kBlock, static_cast<size_t>(sizes[b]));
    end += sizes[b];
  }
  return end;
}

// Calls put(first, size, exponents) for each block; returns the first that is wrong, or -1.
template <class Put>
int64_t decode(const int32_t* sizes, const uint8_t* codes, int64_t num_coded, int64_t n,
               int threads, const Put& put) {
  const int64_t num_blocks = ceil_div(n, kBlock);
  std::vector<int64_t> starts(static_cast<size_t>(num_blocks) + 1);
  for (int64_t b = 0; b < num_blocks; ++b) {
    if (sizes[b] < 1 || sizes[b] > min64(kBlock, n - b * kBlock)) return b;
    starts[static_cast<size_t>(b) + 1] = starts[static_cast<size_t>(b)] + sizes[b];
  }
  if (starts.back() != num_coded) return num_blocks - 1;
  std::vector<uint8_t> right(static_cast<size_t>(num_blocks));
  for_each_block(num_blocks, threads, [&](int64_t b) {
    uint8_t e[kBlock];
    const int64_t first = b * kBlock, size = min64(kBlock, n - first);
    const uint8_t* const coded = codes + starts[static_cast<size_t>(b)];
    right[static_cast<size_t>(b)] = decode_block(coded, sizes[b], size, e);
    if (right[static_cast<size_t>(b)]) put(first, size, e);
  });
  const auto wrong = std::find(right.begin(), right.end(), uint8_t{0});
  return wrong == right.end() ? -1 : wrong - right.begin();
}

}  // namespace

// Fill `low`, `rest`, `sizes` and the front of `codes`, which has room for n bytes; return how many
// of these they take.
GW_EXPORT int64_t gw_exponents_encode(const float* in, float factor, int64_t n, uint16_t* low,
                                      uint8_t* rest, int32_t* sizes, uint8_t* codes, int threads) {
  return encode(Float32{in, low, rest, factor}, n, sizes, codes, threads);
}

GW_EXPORT int64_t gw_exponents_encode16(const uint16_t* in, int64_t n, uint8_t* rest,
                                        int32_t* sizes, uint8_t* codes, int threads) {
  return encode(Bfloat16{in, rest}, n, sizes, codes, threads);
}

// Overwrite `out` with factor times the values, or add the values to it; return the first block that
// is no code, or -1. Without `low` the values are of bfloat16. -2 without memory.
GW_EXPORT int64_t gw_exponents_decode(const uint16_t* low, const uint8_t* rest,
                                      const int32_t* sizes, const uint8_t* codes,
                                      int64_t num_coded, int64_t n, float* out, float factor,
                                      int add, int threads) try {
  const auto put = [&](int64_t first, int64_t size, const uint8_t* e) {
    const uint16_t* const own = low ? low + first : nullptr;
    float* const to = out + first;
    if (add) {
      join(own, rest + first, e, size, to, [](float& at, float x) { at += x; });
    } else if (factor == 1.0f) {
      join(own, rest + first, e, size, to, [](float& at, float x) { at = x; });
    } else {
      join(own, rest + first, e, size, to, [factor](float& at, float x) { at = x * factor; });
    }
  };
  return decode(sizes, codes, num_coded, n, threads, put);
} catch (const std::bad_alloc&) {
  return -2;
}

GW_EXPORT int64_t gw_exponents_decode16(const uint8_t* rest, const int32_t* sizes,
                                        const uint8_t* codes, int64_t num_coded, int64_t n,
                                        uint16_t* out, int threads) try {
  return decode(sizes, codes, num_coded, n, threads,
                [&](int64_t first, int64_t size, const uint8_t* e) {
                  join16(rest + first, e, size, out + first);
                });
} catch (const std::bad_alloc&) {
  return -2;
}
