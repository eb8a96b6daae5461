// cast16: float32 to fp16 or bf16 and back, scaled. Definition: the torch reference in cast.py.
//
// One loop body serves all; the conversions below are written so that compilers vectorise them.
#include <cmath>

#include "blocks.h"

namespace {

using namespace gw;

constexpr int64_t kBlock = 16384;
constexpr int64_t kStrip = 64;  // elements converted at a time, in registers or L1

struct Bf16 {
  static void encode(const float* in, uint16_t* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t bits = bits_of(in[i]);
      const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
      const uint32_t quiet_nan = 0x7fc0u | ((bits >> 16) & 0x8000u);
      out[i] = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
    }
  }
  static void decode(const uint16_t* in, float* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = float_of(static_cast<uint32_t>(in[i]) << 16);
  }
};

// Rounding by adding a number whose unit in the last place is the wanted one (Maratyszcza's FP16).
inline uint16_t half_of(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t twice = bits << 1;
  const float magnitude = float_of(bits & 0x7fffffffu);
  // Saturates in two steps, so that what is above the largest half becomes inf.
  const float base = (magnitude * 0x1.0p+112f) * 0x1.0p-110f;
  uint32_t bias = twice & 0xff000000u;
  bias = bias < 0x71000000u ? 0x71000000u : bias;
  const uint32_t sum = bits_of(float_of((bias >> 1) + 0x07800000u) + base);
  const uint32_t half = ((sum >> 13) & 0x7c00u) + (sum & 0x0fffu);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  return static_cast<uint16_t>(sign | (twice > 0xff000000u ? 0x7e00u : half));
}

inline float float_of_half(uint16_t half) {
  const uint32_t wide = static_cast<uint32_t>(half) << 16;
  const uint32_t twice = wide << 1;
  const float normal = float_of((twice >> 4) + (0xe0u << 23)) * 0x1.0p-112f;
  const float subnormal = float_of((twice >> 17) | (126u << 23)) - 0.5f;
  const float magnitude = twice < (1u << 27) ? subnormal : normal;
  return float_of((wide & 0x80000000u) | bits_of(magnitude));
}

struct Fp16 {
  static void encode(const float* in, uint16_t* out, int64_t n) {
    int64_t i = 0;
#if defined(GW_AVX512)
    for (; i + 16 <= n; i += 16) {
      const __m256i half = _mm512_cvtps_ph(_mm512_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), half);
    }
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8) {
      const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), half);
    }
#endif
    for (; i < n; ++i) out[i] = half_of(in[i]);
  }
  static void decode(const uint16_t* in, float* out, int64_t n) {
    int64_t i = 0;
#if defined(GW_AVX512)
    for (; i + 16 <= n; i += 16) {
      const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
      _mm512_storeu_ps(out + i, _mm512_cvtph_ps(half));
    }
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8) {
      const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
      _mm256_storeu_ps(out + i, _mm256_cvtph_ps(half));
    }
#endif
    for (; i < n; ++i) out[i] = float_of_half(in[i]);
  }
};

// Where the 16-bit value is not finite, the residual keeps its old value.
template <class Half, bool kResidual>
inline __attribute__((always_inline)) void encode_strip(const float* grad, float* residual,
                                                        uint16_t* out, int64_t n, float prescale,
                                                        float inverse) {
  float c[kStrip], scaled[kStrip], decoded[kStrip];
  for (int64_t i = 0; i < n; ++i) c[i] = kResidual ? grad[i] + residual[i] : grad[i];
  for (int64_t i = 0; i < n; ++i) scaled[i] = c[i] * prescale;
  Half::encode(scaled, out, n);
  if (!kResidual) return;
  Half::decode(out, decoded, n);
  for (int64_t i = 0; i < n; ++i) {
    const float left = c[i] - decoded[i] * inverse;
    const bool finite = (bits_of(left) & 0x7fffffffu) < 0x7f800000u;
    residual[i] = finite ? left : residual[i];
  }
}

template <class Half, bool kResidual>
void encode(const float* grad, float* residual, uint16_t* out, int64_t n, float prescale,
            float inverse, int threads) {
  for_each_block(ceil_div(n, kBlock), threads, [&](int64_t b) {
    const int64_t end = min64((b + 1) * kBlock, n);
    const auto strip = [&](int64_t i, int64_t count) {
      float* const r = kResidual ? residual + i : nullptr;
      encode_strip<Half, kResidual>(grad + i, r, out + i, count, prescale, inverse);
    };
    int64_t i = b * kBlock;
    for (; i + kStrip <= end; i += kStrip) strip(i, kStrip);  // a constant, so it is unrolled
    if (i < end) strip(i, end - i);
  });
}

template <class Half>
void encode(const float* grad, float* residual, uint16_t* out, int64_t n, float prescale,
            float inverse, int threads) {
  (residual ? encode<Half, true> : encode<Half, false>)(grad, residual, out, n, prescale, inverse,
                                                        threads);
}

template <class Half, bool kAdd>
void decode(const uint16_t* in, float* out, int64_t n, float scale, int threads) {
  for_each_block(ceil_div(n, kBlock), threads, [&](int64_t b) {
    const int64_t end = min64((b + 1) * kBlock, n);
    const auto strip = [&](int64_t start, int64_t count) {
      float decoded[kStrip];
      Half::decode(in + start, decoded, count);
      for (int64_t i = 0; i < count; ++i) {
        const float x = decoded[i] * scale;
        out[start + i] = kAdd ? out[start + i] + x : x;
      }
    };
    int64_t i = b * kBlock;
    for (; i + kStrip <= end; i += kStrip) strip(i, kStrip);
    if (i < end) strip(i, end - i);
  });
}

}  // namespace

GW_EXPORT void gw_cast16_encode(const float* grad, float* residual, uint16_t* out, int64_t n,
                                int is_bf16, float prescale, float inverse, int threads) {
  (is_bf16 ? encode<Bf16> : encode<Fp16>)(grad, residual, out, n, prescale, inverse, threads);
}

// Overwrites `out`, or adds to it.
GW_EXPORT void gw_cast16_decode(const uint16_t* in, float* out, int64_t n, int is_bf16,
                                float scale, int add, int threads) {
  const auto to = is_bf16 ? (add ? decode<Bf16, true> : decode<Bf16, false>)
                          : (add ? decode<Fp16, true> : decode<Fp16, false>);
  to(in, out, n, scale, threads);
}
