// Packing: code i of k bits lies at bit k * i; codes 0 to 2 lie five in a byte.
#pragma once

#include "blocks.h"

namespace gw {

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

// ---- codes 0 to 2, five a byte: byte b of a group is the sum of code[b + 13 i] * 3^i ------------

// Code 64, which no group has, is 0.
constexpr int kFives = 13;

inline size_t bytes_by_five(int count) { return static_cast<size_t>(count < kFives ? count : kFives); }

// Rows of 16, of which each but the last is followed by what the next one overwrites.
inline GW_INLINE void pack_by_five(const uint8_t (&code)[kLanes], uint8_t* out, int count) {
  uint8_t digit[4 * kFives + 16] = {}, sum[16] = {};
  std::memcpy(digit, code, sizeof code);
  for (int i = 4; i >= 0; --i) {
    for (int b = 0; b < 16; ++b) sum[b] = static_cast<uint8_t>(3 * sum[b] + digit[kFives * i + b]);
  }
  std::memcpy(out, sum, bytes_by_five(count));
}

inline GW_INLINE void unpack_by_five(const uint8_t* in, uint8_t (&code)[kLanes], int count) {
  uint8_t digit[4 * kFives + 16], row[16];
  uint16_t rest[16];
  std::memset(row, 0, sizeof row);
  std::memcpy(row, in, bytes_by_five(count));
  for (int b = 0; b < 16; ++b) rest[b] = row[b];
  for (int i = 0; i < 5; ++i) {
    for (int b = 0; b < 16; ++b) {
      const uint16_t third = static_cast<uint16_t>(rest[b] * 171 >> 9);  // as far as a byte goes
      row[b] = static_cast<uint8_t>(rest[b] - 3 * third);
      rest[b] = third;
    }
    std::memcpy(digit + kFives * i, row, sizeof row);
  }
  std::memcpy(code, digit, sizeof code);
}

}  // namespace gw
