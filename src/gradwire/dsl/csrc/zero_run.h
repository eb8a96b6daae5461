// Zero-run encoding: bytes up to 242 stand for themselves, 243 to 255 for 2 to 14 zeros.
#pragma once

#include "blocks.h"

namespace gw {

constexpr int64_t kLongestRun = 14;
constexpr int kRunBase = 241;  // the code of a run, less its length

// Writes a number of zeros; of none it writes a byte that is still to be overwritten.
inline GW_INLINE uint8_t* put_zeros(uint8_t* out, int64_t count) {
  for (; count >= kLongestRun; count -= kLongestRun) *out++ = kRunBase + kLongestRun;
  *out = static_cast<uint8_t>(count < 2 ? 0 : kRunBase + count);
  return out + (count > 0);
}

// In place: what is written never passes what was read. Eight bytes at a time are looked through
// for those that are not zero, which takes no branch a byte.
inline int64_t zero_run_encode(uint8_t* bytes, int64_t n) {
  constexpr uint64_t kLow7 = 0x7F7F7F7F7F7F7F7Fu;
  uint8_t* out = bytes;
  int64_t next = 0;  // behind the last byte that is not zero
  for (int64_t at = 0; at < n; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + at, static_cast<size_t>(min64(8, n - at)));
    uint64_t high = (((word & kLow7) + kLow7) | word) & ~kLow7;  // the top bit of each
    for (; high; high &= high - 1) {
      const int place = __builtin_ctzll(high) / 8;
      out = put_zeros(out, at + place - next);
      *out++ = static_cast<uint8_t>(word >> (8 * place));
      next = at + place + 1;
    }
  }
  if (next < n) out = put_zeros(out, n - next);
  return out - bytes;
}

inline bool zero_run_decode(const uint8_t* in, int64_t length, uint8_t* out, int64_t n) {
  std::memset(out, 0, static_cast<size_t>(n));
  int64_t at = 0;
  for (int64_t i = 0; i < length; ++i) {
    if (at >= n) return false;
    const int byte = in[i];
    const bool literal = byte <= kRunBase + 1;
    out[at] = static_cast<uint8_t>(literal ? byte : 0);
    at += literal ? 1 : byte - kRunBase;
  }
  return at == n;
}

}  // namespace gw
