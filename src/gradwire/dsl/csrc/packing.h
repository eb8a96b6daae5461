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

// A group's 64 codes are four rows, its bytes a row of 13 (three more hold anything). Rows are put
// together in registers, for the same reason as above. Code 64, which no group has, is 0.
typedef uint8_t Row __attribute__((vector_size(16)));
typedef uint16_t WideRow __attribute__((vector_size(32)));
typedef uint64_t RowWords __attribute__((vector_size(16)));

// A row of the elements with these numbers among the 32 of two rows.
#if defined(__clang__)
#define GW_CHOSEN(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define GW_CHOSEN(a, b, ...) __builtin_shuffle(a, b, ::gw::Row{__VA_ARGS__})
#endif
#define GW_CHOSEN_FROM(n, a, b)                                                                \
  GW_CHOSEN(a, b, n, n + 1, n + 2, n + 3, n + 4, n + 5, n + 6, n + 7, n + 8, n + 9, n + 10,    \
            n + 11, n + 12, n + 13, n + 14, n + 15)

inline size_t bytes_by_five(int count) { return static_cast<size_t>(count < 13 ? count : 13); }

inline GW_INLINE void pack_by_five(const uint8_t (&code)[kLanes], uint8_t* out, int count) {
  Row row[4];
  std::memcpy(row, code, sizeof row);
  Row sum = GW_CHOSEN_FROM(4, row[3], Row{});
  sum = sum + sum + sum + GW_CHOSEN_FROM(7, row[2], row[3]);
  sum = sum + sum + sum + GW_CHOSEN_FROM(10, row[1], row[2]);
  sum = sum + sum + sum + GW_CHOSEN_FROM(13, row[0], row[1]);
  sum = sum + sum + sum + row[0];
  std::memcpy(out, &sum, bytes_by_five(count));
}

// The bytes of a group as a row: of a full group two words that overlap.
inline GW_INLINE Row read_by_five(const uint8_t* in, int count) {
  uint64_t low = 0, high = 0;
  if (count < 8) {
    std::memcpy(&low, in, static_cast<size_t>(count));
  } else {
    const size_t size = bytes_by_five(count);
    std::memcpy(&low, in, 8);
    std::memcpy(&high, in + size - 8, 8);
    high = size > 8 ? high >> 8 * (16 - size) : 0;
  }
  return (Row)RowWords{low, high};
}

inline GW_INLINE void unpack_by_five(const uint8_t* in, uint8_t (&code)[kLanes], int count) {
  WideRow rest = __builtin_convertvector(read_by_five(in, count), WideRow);
  Row digit[5];
  for (Row& found : digit) {
    const WideRow third = rest * 171 >> 9;  // rest / 3, as far as a byte goes
    found = __builtin_convertvector(rest - third * 3, Row);
    rest = third;
  }
  const auto a = (RowWords)GW_CHOSEN(digit[0], digit[1], 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,
                                     16, 17, 18);
  const auto b = (RowWords)GW_CHOSEN(digit[1], digit[2], 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16, 17,
                                     18, 19, 20, 21);
  const auto c = (RowWords)GW_CHOSEN(digit[2], digit[3], 6, 7, 8, 9, 10, 11, 12, 16, 17, 18, 19,
                                     20, 21, 22, 23, 24);
  const auto d = (RowWords)GW_CHOSEN(digit[3], digit[4], 9, 10, 11, 12, 16, 17, 18, 19, 20, 21, 22,
                                     23, 24, 25, 26, 27);
  const Words all = {a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]};
  std::memcpy(code, &all, sizeof all);
}

}  // namespace gw
