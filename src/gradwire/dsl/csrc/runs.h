// Bytes by runs: up to kMost adjacent bytes kOf are a run, every other byte is one by itself.
// (runs.py makes the tables: the code of each, and the byte and the times of each code.)
#pragma once

#include "blocks.h"

namespace gw {

// Writes the codes of a number of bytes kOf; of none a byte that is still to be overwritten.
template <int kMost>
inline GW_INLINE uint8_t* put_runs(uint8_t* out, int64_t count, const uint8_t (&run)[kMost + 1]) {
  for (; count >= kMost; count -= kMost) *out++ = run[kMost];
  *out = run[count];
  return out + (count > 0);
}

// In place: what is written never passes what was read. Eight bytes at a time are looked through
// for those that are not kOf, which takes no branch a byte.
template <int kOf, int kMost>
inline int64_t encode_runs(uint8_t* bytes, int64_t n, const uint8_t (&single)[256],
                           const uint8_t (&run)[kMost + 1]) {
  constexpr uint64_t kLow7 = 0x7F7F7F7F7F7F7F7Fu, kAll = kOf * 0x0101010101010101u;
  uint8_t* out = bytes;
  int64_t next = 0;  // behind the last byte that is not kOf
  for (int64_t at = 0; at < n; at += 8) {
    uint64_t word = kAll;
    std::memcpy(&word, bytes + at, static_cast<size_t>(min64(8, n - at)));
    word ^= kAll;
    uint64_t high = (((word & kLow7) + kLow7) | word) & ~kLow7;  // the top bit of each
    for (; high; high &= high - 1) {
      const int place = __builtin_ctzll(high) / 8;
      out = put_runs<kMost>(out, at + place - next, run);
      *out++ = single[static_cast<uint8_t>(word >> (8 * place)) ^ kOf];
      next = at + place + 1;
    }
  }
  if (next < n) out = put_runs<kMost>(out, n - next, run);
  return out - bytes;
}

template <int kOf>
inline bool decode_runs(const uint8_t* in, int64_t length, uint8_t* out, int64_t n,
                        const uint8_t (&byte)[256], const int32_t (&times)[256]) {
  std::memset(out, kOf, static_cast<size_t>(n));
  int64_t at = 0;
  for (int64_t i = 0; i < length; ++i) {
    if (at >= n) return false;
    out[at] = byte[in[i]];
    at += times[in[i]];
  }
  return at == n;
}

}  // namespace gw
