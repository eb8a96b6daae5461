// zlib's CRC-32 of the first bytes of a buffer. Definition: zlib.crc32.
//
// Source: Gopal et al., "Fast CRC computation for generic polynomials using PCLMULQDQ" (Intel 2009).
// Four lanes of 16 bytes are folded by carry-less multiplication, then into one, then into 32 bits.
#include "blocks.h"

#if defined(__PCLMUL__) && defined(__SSE4_1__)
#include <immintrin.h>

namespace {

inline __m128i fold(__m128i lane, __m128i by, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(lane, by, 0x00);
  const __m128i high = _mm_clmulepi64_si128(lane, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

inline __m128i load(const uint8_t* at) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
}

}  // namespace

// Updates `crc` by as many bytes as it takes (all but fewer than 16, none of fewer than 64), and
// returns how many; 0 where the processor has no carry-less multiplication.
GW_EXPORT int64_t gw_crc32(const uint8_t* bytes, int64_t n, uint32_t* crc) {
  if (n < 64) return 0;
  const uint8_t* at = bytes;
  const uint8_t* const end = bytes + n / 16 * 16;
  const __m128i by_64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
  const __m128i by_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  __m128i a = _mm_xor_si128(load(at), _mm_cvtsi32_si128(static_cast<int>(~*crc)));
  __m128i b = load(at + 16), c = load(at + 32), d = load(at + 48);
  for (at += 64; at + 64 <= end; at += 64) {
    __builtin_prefetch(at + gw::kPrefetchBytes, 0, 2);
    a = fold(a, by_64, load(at));
    b = fold(b, by_64, load(at + 16));
    c = fold(c, by_64, load(at + 32));
    d = fold(d, by_64, load(at + 48));
  }
  a = fold(fold(fold(a, by_16, b), by_16, c), by_16, d);
  for (; at < end; at += 16) a = fold(a, by_16, load(at));
  // 128 bits to 64, then Barrett's reduction to 32.
  const __m128i low_32 = _mm_setr_epi32(~0, 0, ~0, 0);
  a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by_16, 0x10));
  a = _mm_xor_si128(_mm_srli_si128(a, 4),
                    _mm_clmulepi64_si128(_mm_and_si128(a, low_32), _mm_cvtsi64_si128(0x0163cd6124),
                                         0x00));
  const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  __m128i t = _mm_clmulepi64_si128(_mm_and_si128(a, low_32), barrett, 0x10);
  t = _mm_clmulepi64_si128(_mm_and_si128(t, low_32), barrett, 0x00);
  *crc = ~static_cast<uint32_t>(_mm_extract_epi32(_mm_xor_si128(a, t), 1));
  return end - bytes;
}
#else
GW_EXPORT int64_t gw_crc32(const uint8_t* bytes, int64_t n, uint32_t* crc) { return 0; }
#endif
