// exponents: the exponents of float32 or bfloat16 in prefix codes of each block, all other bits as
// they are. Definition: the torch reference in exponents.py.
//
// A block's codes lie in four streams: four decodes that wait for no other keep a core busy. What
// is decoded came over a network, so nothing here trusts it. A stream is read in a copy of its block
// with zeros behind it, as far as its elements can reach by the longest codes.
#include <algorithm>
#include <new>
#include <vector>

#include "blocks.h"

namespace {

using namespace gw;

// ---- exponents of one block in a prefix code of their own ----------------------------------------

constexpr int64_t kBlock = 4096;
constexpr int64_t kStreams = 4;
constexpr int kLongest = 12;  // bits of a code: that of an exponent that one element of a block has
constexpr uint32_t kTable = 1u << kLongest;
constexpr int64_t kReach = kBlock / kStreams * kLongest / 8 + 16;  // bytes of the longest stream

// The streams of a block of n elements hold `part` elements each, the last ones fewer or none.
struct Streams {
  explicit Streams(int64_t n) : n(n), part(ceil_div(n, kStreams)) {}
  int64_t first(int64_t s) const { return min64(s * part, n); }
  int64_t size(int64_t s) const { return first(s + 1) - first(s); }
  int64_t n;
  int64_t part;
};

void count(const uint8_t* e, int64_t n, uint32_t* counts) {
  uint32_t own[4][256] = {};  // one table would wait for itself where neighbours are equal
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    for (int64_t j = 0; j < 4; ++j) ++own[j][e[i + j]];
  }
  for (; i < n; ++i) ++own[0][e[i]];
  for (int v = 0; v < 256; ++v) counts[v] = own[0][v] + own[1][v] + own[2][v] + own[3][v];
}

// A code of one block: the lengths of its exponents, 0 for those that are not there.
struct Code {
  uint8_t lengths[256] = {};
  int lowest = 256;  // exponent but 0
  int highest = 0;

  int num_lengths() const { return highest - lowest + 2; }
  int64_t header_bytes() const { return 2 + (num_lengths() + 1) / 2 + 2 * (kStreams - 1); }
  int exponent(int place) const { return place ? lowest + place - 1 : 0; }
};

// Every exponent's share of the block, rounded up to a power of two; what the sum then lacks of 1
// goes to those that gain most by a bit less. Two exponents or more, of n elements.
Code code_of(const uint32_t* counts, int64_t n) {
  Code code;
  uint8_t there[256];
  int num = 0;
  uint32_t spare = kTable;
  for (int v = 0; v < 256; ++v) {
    if (!counts[v]) continue;
    there[num++] = static_cast<uint8_t>(v);
    if (v) code.lowest = std::min(code.lowest, v);
    code.highest = v;
    int length = 0;
    while ((static_cast<int64_t>(counts[v]) << length) < n) ++length;
    code.lengths[v] = static_cast<uint8_t>(length);
    spare -= kTable >> length;
  }
  while (spare) {
    int best = -1;
    uint32_t most = 0;
    for (int i = 0; i < num; ++i) {
      const int length = code.lengths[there[i]];
      const uint32_t gain = counts[there[i]] << length;
      if ((kTable >> length) > spare || gain <= most) continue;
      most = gain;
      best = there[i];
    }
    spare -= kTable >> code.lengths[best];
    --code.lengths[best];
  }
  return code;
}

// Bits of each exponent, and their number from bit 16 on; shorter codes first, then lower exponents.
void assign_bits(const Code& code, uint32_t* bits) {
  uint32_t next = 0;
  for (int length = 1; length <= kLongest; ++length) {
    next <<= 1;
    for (int place = 0; place < code.num_lengths(); ++place) {
      const int v = code.exponent(place);
      if (code.lengths[v] == length) bits[v] = static_cast<uint32_t>(length) << 16 | next++;
    }
  }
}

void store_bits(uint64_t held, int num, uint8_t* out) {  // num from 1 to 63
  const uint64_t bytes = __builtin_bswap64(held << (64 - num));
  std::memcpy(out, &bytes, sizeof bytes);
}

// Writes up to 8 bytes more than the stream has; returns its end.
uint8_t* write_stream(const uint8_t* e, int64_t n, const uint32_t* bits, uint8_t* out) {
  uint64_t held = 0;
  int num = 0;
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const uint32_t a = bits[e[i]], b = bits[e[i + 1]], c = bits[e[i + 2]], d = bits[e[i + 3]];
    const uint64_t ab = static_cast<uint64_t>(a & 0xffffu) << (b >> 16) | (b & 0xffffu);
    const uint64_t cd = static_cast<uint64_t>(c & 0xffffu) << (d >> 16) | (d & 0xffffu);
    const int size_cd = static_cast<int>((c >> 16) + (d >> 16));
    const int size = static_cast<int>((a >> 16) + (b >> 16)) + size_cd;
    held = held << size | ab << size_cd | cd;
    num += size;
    store_bits(held, num, out);
    out += num >> 3;
    num &= 7;
  }
  for (; i < n; ++i) {
    held = held << (bits[e[i]] >> 16) | (bits[e[i]] & 0xffffu);
    num += static_cast<int>(bits[e[i]] >> 16);
    store_bits(held, num, out);
    out += num >> 3;
    num &= 7;
  }
  if (num) store_bits(held, num, out);
  return out + (num > 0);
}

void store_size(int64_t size, uint8_t* out) {
  out[0] = static_cast<uint8_t>(size);
  out[1] = static_cast<uint8_t>(size >> 8);
}

// Returns the bytes of the block, at most n, and has room for 16 more.
int64_t encode_block(const uint8_t* e, int64_t n, uint8_t* out) {
  uint32_t counts[256];
  count(e, n, counts);
  if (counts[e[0]] == n) {
    out[0] = e[0];
    return 1;
  }
  const Code code = code_of(counts, n);
  int64_t size_bits = 0;
  for (int v = 0; v < 256; ++v) size_bits += static_cast<int64_t>(counts[v]) * code.lengths[v];
  if (code.header_bytes() + size_bits / 8 + kStreams >= n) {
    std::memcpy(out, e, static_cast<size_t>(n));
    return n;
  }
  uint32_t bits[256];
  assign_bits(code, bits);
  const int num_lengths = code.num_lengths();
  uint8_t* at = out;
  *at++ = static_cast<uint8_t>(code.lowest);
  *at++ = static_cast<uint8_t>(num_lengths - 2);
  for (int i = 0; i < num_lengths; i += 2) {
    const int other = i + 1 < num_lengths ? code.lengths[code.exponent(i + 1)] : 0;
    *at++ = static_cast<uint8_t>(code.lengths[code.exponent(i)] | other << 4);
  }
  uint8_t* const sizes = at;
  at += 2 * (kStreams - 1);
  const Streams streams(n);
  for (int64_t s = 0; s < kStreams; ++s) {
    uint8_t* const end = write_stream(e + streams.first(s), streams.size(s), bits, at);
    if (s + 1 < kStreams) store_size(end - at, sizes + 2 * s);
    at = end;
  }
  return at - out;
}

// Reads a block's lengths, and where its streams begin; false where they are no code.
bool read_header(const uint8_t* coded, int64_t size, Code* code, int64_t* starts) {
  if (size < 2) return false;
  code->lowest = coded[0];
  code->highest = code->lowest + coded[1];
  if (code->lowest == 0 || code->highest > 255 || code->header_bytes() > size) return false;
  uint32_t whole = 0;
  for (int place = 0; place < code->num_lengths(); ++place) {
    const int length = coded[2 + place / 2] >> (place % 2 ? 4 : 0) & 15;
    if (length > kLongest) return false;
    code->lengths[code->exponent(place)] = static_cast<uint8_t>(length);
    whole += length ? kTable >> length : 0;
  }
  const uint8_t* const sizes = coded + code->header_bytes() - 2 * (kStreams - 1);
  starts[0] = 0;
  for (int64_t s = 0; s + 1 < kStreams; ++s) {
    starts[s + 1] = starts[s] + (sizes[2 * s] | sizes[2 * s + 1] << 8);
  }
  starts[kStreams] = size - code->header_bytes();
  return whole == kTable && starts[kStreams - 1] <= starts[kStreams];
}

// The exponent, and its code's length from bit 8 on, of every 12 bits; the code is complete.
void fill_table(const Code& code, uint16_t* table) {
  uint32_t num[kLongest + 1] = {};
  for (int place = 0; place < code.num_lengths(); ++place) ++num[code.lengths[code.exponent(place)]];
  uint32_t at[kLongest + 1] = {};
  for (int length = 1; length < kLongest; ++length) {
    at[length + 1] = at[length] + num[length] * (kTable >> length);
  }
  for (int place = 0; place < code.num_lengths(); ++place) {
    const int v = code.exponent(place), length = code.lengths[v];
    if (!length) continue;
    std::fill_n(table + at[length], kTable >> length, static_cast<uint16_t>(length << 8 | v));
    at[length] += kTable >> length;
  }
}

struct Reader {
  const uint8_t* bytes;
  int64_t at;  // bits
  uint8_t* out;

  uint64_t next() const {
    uint64_t found;
    std::memcpy(&found, bytes + (at >> 3), sizeof found);
    return __builtin_bswap64(found) << (at & 7);
  }
  void take(const uint16_t* table, uint64_t* found) {
    const uint16_t entry = table[*found >> (64 - kLongest)];
    *out++ = static_cast<uint8_t>(entry);
    *found <<= entry >> 8;
    at += entry >> 8;
  }
};

// Fills e with the n exponents of a block; false where these bytes are none.
bool decode_block(const uint8_t* coded, int64_t size, int64_t n, uint8_t* e) {
  if (size == n) {
    std::memcpy(e, coded, static_cast<size_t>(n));
    return true;
  }
  if (size == 1) {
    std::memset(e, coded[0], static_cast<size_t>(n));
    return true;
  }
  Code code;
  int64_t starts[kStreams + 1];
  if (!read_header(coded, size, &code, starts)) return false;
  uint16_t table[kTable];
  fill_table(code, table);
  uint8_t local[kBlock + kReach];
  std::memcpy(local, coded + code.header_bytes(), static_cast<size_t>(starts[kStreams]));
  std::memset(local + starts[kStreams], 0, static_cast<size_t>(kReach));
  const Streams streams(n);
  Reader readers[kStreams];
  for (int64_t s = 0; s < kStreams; ++s) readers[s] = {local + starts[s], 0, e + streams.first(s)};
  const int64_t together = streams.size(kStreams - 1) / 4 * 4;
  for (int64_t i = 0; i < together; i += 4) {
    Reader &a = readers[0], &b = readers[1], &c = readers[2], &d = readers[3];
    uint64_t in_a = a.next(), in_b = b.next(), in_c = c.next(), in_d = d.next();
    for (int j = 0; j < 4; ++j) {
      a.take(table, &in_a);
      b.take(table, &in_b);
      c.take(table, &in_c);
      d.take(table, &in_d);
    }
  }
  bool ends = true;
  for (int64_t s = 0; s < kStreams; ++s) {
    for (int64_t i = together; i < streams.size(s); ++i) {
      uint64_t found = readers[s].next();
      readers[s].take(table, &found);
    }
    ends = ends && (readers[s].at + 7) / 8 == starts[s + 1] - starts[s];
  }
  return ends;
}

// ---- values and their exponents ------------------------------------------------------------------

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

// Fills `low`, `rest`, `sizes` and the front of `codes`, which has room for n bytes; returns how many
// of these it takes. Without `low` the values are of bfloat16, and no factor multiplies them.
GW_EXPORT int64_t gw_exponents_encode(const void* in, float factor, int64_t n, uint16_t* low,
                                      uint8_t* rest, int32_t* sizes, uint8_t* codes, int threads) {
  if (!low) return encode(Bfloat16{static_cast<const uint16_t*>(in), rest}, n, sizes, codes, threads);
  const Float32 values{static_cast<const float*>(in), low, rest, factor};
  return encode(values, n, sizes, codes, threads);
}

// Overwrites `out` with factor times the values, or adds the values to it; returns the first block
// that is no code, or -1. Without `low` the values are of bfloat16; if `narrow` `out` is too, which
// they overwrite. -2 without memory.
GW_EXPORT int64_t gw_exponents_decode(const uint16_t* low, const uint8_t* rest,
                                      const int32_t* sizes, const uint8_t* codes,
                                      int64_t num_coded, int64_t n, void* out, int narrow,
                                      float factor, int add, int threads) try {
  const auto put = [&](int64_t first, int64_t size, const uint8_t* e) {
    if (narrow) return join16(rest + first, e, size, static_cast<uint16_t*>(out) + first);
    const uint16_t* const own = low ? low + first : nullptr;
    float* const to = static_cast<float*>(out) + first;
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
