// onebit: one bit an element and two means a block. Definition: the torch reference in onebit.py.
//
// A block is read twice: once for sums and bits (from memory), once for the residual (from L2).
// Sums run in 32 float lanes for 4096 elements and are then folded into doubles, in the same
// order with and without AVX-512, so that all machines compute the same bytes.
#include <cmath>

#include "blocks.h"

namespace {

constexpr int64_t kGroup = 32;      // elements whose bits make one 32-bit word
constexpr int64_t kFold = 4096;     // elements between two folds of float lanes into doubles

struct Sums {
  double neg = 0.0;
  double pos = 0.0;
  int64_t num_pos = 0;
};

// 32 float lanes in a fixed tree of additions; the order is part of the result.
double fold(const float* lane) {
  double part[8];
  for (int i = 0; i < 8; ++i) {
    part[i] = static_cast<double>(lane[i] + lane[i + 16]) +
              static_cast<double>(lane[i + 8] + lane[i + 24]);
  }
  return ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
}

#ifdef GW_AVX512
struct Lanes {
  __m512 neg[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  __m512 pos[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};

  // Adds 32 elements to the sums and returns their bits.
  template <bool kResidual>
  uint32_t add(const float* grad, const float* residual) {
    uint32_t bits = 0;
    for (int half = 0; half < 2; ++half) {
      __m512 c = _mm512_loadu_ps(grad + 16 * half);
      if (kResidual) c = _mm512_add_ps(c, _mm512_loadu_ps(residual + 16 * half));
      const __mmask16 mask = _mm512_cmp_ps_mask(c, _mm512_setzero_ps(), _CMP_GE_OQ);
      pos[half] = _mm512_mask_add_ps(pos[half], mask, pos[half], c);
      neg[half] = _mm512_mask_add_ps(neg[half], static_cast<__mmask16>(~mask), neg[half], c);
      bits |= static_cast<uint32_t>(mask) << (16 * half);
    }
    return bits;
  }

  void fold_into(Sums& sums) const {
    alignas(64) float lane[2 * kGroup];
    for (int half = 0; half < 2; ++half) {
      _mm512_store_ps(lane + 16 * half, neg[half]);
      _mm512_store_ps(lane + kGroup + 16 * half, pos[half]);
    }
    sums.neg += fold(lane);
    sums.pos += fold(lane + kGroup);
  }
};
#else
struct Lanes {
  float neg[kGroup] = {};
  float pos[kGroup] = {};

  // Adds 32 elements to the sums and returns their bits.
  template <bool kResidual>
  uint32_t add(const float* grad, const float* residual) {
    float c[kGroup];
    for (int i = 0; i < kGroup; ++i) c[i] = kResidual ? grad[i] + residual[i] : grad[i];
    for (int i = 0; i < kGroup; ++i) {
      pos[i] += c[i] >= 0.0f ? c[i] : 0.0f;
      neg[i] += c[i] >= 0.0f ? 0.0f : c[i];
    }
    uint32_t bits = 0;
#ifdef __AVX2__
    for (int i = 0; i < kGroup; i += 8) {
      const __m256 ge = _mm256_cmp_ps(_mm256_loadu_ps(c + i), _mm256_setzero_ps(), _CMP_GE_OQ);
      bits |= static_cast<uint32_t>(_mm256_movemask_ps(ge)) << i;
    }
#else
    for (int i = 0; i < kGroup; ++i) bits |= static_cast<uint32_t>(c[i] >= 0.0f) << i;
#endif
    return bits;
  }

  void fold_into(Sums& sums) const {
    sums.neg += fold(neg);
    sums.pos += fold(pos);
  }
};
#endif

template <bool kResidual>
void sum_tail(const float* grad, const float* residual, int64_t n, uint8_t* bits, Lanes& lanes,
              Sums& sums) {
  float padded[kGroup] = {};  // a zero changes no sum, and its bit is masked out
  for (int64_t i = 0; i < n; ++i) padded[i] = kResidual ? grad[i] + residual[i] : grad[i];
  uint32_t word = lanes.add<false>(padded, nullptr);
  word &= (uint32_t{1} << n) - 1;
  std::memcpy(bits, &word, static_cast<size_t>(gw::ceil_div(n, 8)));
  sums.num_pos += __builtin_popcount(word);
}

// Reads a block, writes its bits, returns its sums.
template <bool kResidual>
Sums sum_block(const float* grad, const float* residual, int64_t n, uint8_t* bits) {
  Sums sums;
  for (int64_t start = 0; start < n; start += kFold) {
    const int64_t end = gw::min64(start + kFold, n);
    Lanes lanes;
    int64_t i = start;
    for (; i + kGroup <= end; i += kGroup) {
      for (int64_t line = i; line < i + kGroup; line += 16) {
        gw::prefetch_ahead(grad + line);
        if (kResidual) gw::prefetch_ahead(residual + line);
      }
      const uint32_t word = lanes.add<kResidual>(grad + i, kResidual ? residual + i : nullptr);
      std::memcpy(bits + i / 8, &word, sizeof word);
      sums.num_pos += __builtin_popcount(word);
    }
    if (i < end) {
      sum_tail<kResidual>(grad + i, kResidual ? residual + i : nullptr, end - i, bits + i / 8,
                          lanes, sums);
    }
    lanes.fold_into(sums);
  }
  return sums;
}

// The float lanes overflow before the mean does; doubles cannot, so what is not finite here
// comes from an element that is not.
template <bool kResidual>
void sum_in_double(const float* grad, const float* residual, int64_t n, Sums& sums) {
  sums.neg = sums.pos = 0.0;
  for (int64_t i = 0; i < n; ++i) {
    const float c = kResidual ? grad[i] + residual[i] : grad[i];
    (c >= 0.0f ? sums.pos : sums.neg) += static_cast<double>(c);
  }
}

// residual = c - decoded; both operands are still in L2.
void update_residual(const float* grad, float* residual, int64_t n, float low, float high) {
  for (int64_t i = 0; i < n; ++i) {
    const float c = grad[i] + residual[i];
    residual[i] = c - (c >= 0.0f ? high : low);
  }
}

template <bool kResidual>
void encode(const float* grad, float* residual, int64_t n, int64_t block, float* scales,
            uint8_t* bits, int threads) {
  gw::for_each_block(gw::ceil_div(n, block), threads, [&](int64_t b) {
    const int64_t start = b * block;
    const int64_t count = gw::min64(block, n - start);
    float* const r = kResidual ? residual + start : nullptr;
    Sums sums = sum_block<kResidual>(grad + start, r, count, bits + start / 8);
    if (!std::isfinite(sums.neg) || !std::isfinite(sums.pos)) {
      sum_in_double<kResidual>(grad + start, r, count, sums);
    }
    const int64_t num_neg = count - sums.num_pos;
    const float low = num_neg ? static_cast<float>(sums.neg / static_cast<double>(num_neg)) : 0.0f;
    const float high =
        sums.num_pos ? static_cast<float>(sums.pos / static_cast<double>(sums.num_pos)) : 0.0f;
    scales[2 * b] = low;
    scales[2 * b + 1] = high;
    if (kResidual && std::isfinite(low) && std::isfinite(high)) {
      update_residual(grad + start, r, count, low, high);
    }
  });
}

template <bool kAdd>
void decode_block(const uint8_t* bits, float low, float high, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup) {
    uint32_t word;
    std::memcpy(&word, bits + i / 8, sizeof word);
#ifdef GW_AVX512
    for (int half = 0; half < 2; ++half) {
      const __mmask16 mask = static_cast<__mmask16>(word >> (16 * half));
      const __m512 x = _mm512_mask_blend_ps(mask, _mm512_set1_ps(low), _mm512_set1_ps(high));
      float* const to = out + i + 16 * half;
      _mm512_storeu_ps(to, kAdd ? _mm512_add_ps(_mm512_loadu_ps(to), x) : x);
    }
#else
    for (int j = 0; j < kGroup; ++j) {
      const float x = (word >> j) & 1 ? high : low;
      out[i + j] = kAdd ? out[i + j] + x : x;
    }
#endif
  }
  for (; i < n; ++i) {
    const float x = (bits[i / 8] >> (i % 8)) & 1 ? high : low;
    out[i] = kAdd ? out[i] + x : x;
  }
}

template <bool kAdd>
void decode(const float* scales, const uint8_t* bits, float* out, int64_t n, int64_t block,
            float scale, int threads) {
  gw::for_each_block(gw::ceil_div(n, block), threads, [&](int64_t b) {
    const int64_t start = b * block;
    const int64_t count = gw::min64(block, n - start);
    decode_block<kAdd>(bits + start / 8, scale * scales[2 * b], scale * scales[2 * b + 1],
                         out + start, count);
  });
}

}  // namespace

GW_EXPORT void gw_onebit_encode(const float* grad, float* residual, int64_t n, int64_t block,
                                float* scales, uint8_t* bits, int threads) {
  if (residual) {
    encode<true>(grad, residual, n, block, scales, bits, threads);
  } else {
    encode<false>(grad, nullptr, n, block, scales, bits, threads);
  }
}

GW_EXPORT void gw_onebit_decode(const float* scales, const uint8_t* bits, float* out, int64_t n,
                                int64_t block, float scale, int threads) {
  decode<false>(scales, bits, out, n, block, scale, threads);
}

GW_EXPORT void gw_onebit_decode_add(const float* scales, const uint8_t* bits, float* sum,
                                    int64_t n, int64_t block, int threads) {
  decode<true>(scales, bits, sum, n, block, 1.0f, threads);
}
