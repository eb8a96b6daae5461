// nonzero: the units of a vector that have a bit set, as indices and values. Definition: the torch
// reference in nonzero.py.
//
// Every block writes what it keeps where its first unit would lie if all were kept; when all counts
// are known the blocks are moved together. Few pages are touched where few units are kept, and no
// memory but the payload's own is needed.
#include <algorithm>
#include <new>
#include <vector>

#include "blocks.h"

namespace {

using namespace gw;

constexpr int64_t kBlock = 16384;  // elements of a block, where units are shorter

struct Kept {
  int32_t* indices;
  float* values;
};

inline bool has_bit(const float* x, int64_t n) {
  uint32_t bits = 0;
  for (int64_t i = 0; i < n; ++i) bits |= bits_of(x[i]);
  return bits != 0;
}

// Elements `first` to `first + n` as units of one.
int64_t keep_elements(const float* c, int64_t n, int64_t first, Kept out) {
  int64_t count = 0;
  int64_t i = 0;
#ifdef GW_AVX512
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (; i + 16 <= n; i += 16) {
    prefetch_ahead(c + i);
    const __m512i bits = _mm512_loadu_si512(c + i);
    const __mmask16 pass = _mm512_test_epi32_mask(bits, bits);
    if (!pass) continue;
    const __m512i index = _mm512_add_epi32(lane, _mm512_set1_epi32(static_cast<int>(first + i)));
    _mm512_mask_compressstoreu_epi32(out.values + count, pass, bits);
    _mm512_mask_compressstoreu_epi32(out.indices + count, pass, index);
    count += __builtin_popcount(pass);
  }
#endif
  for (; i < n; ++i) {
    if (!has_bit(c + i, 1)) continue;
    out.values[count] = c[i];
    out.indices[count++] = static_cast<int32_t>(first + i);
  }
  return count;
}

// The same in units of `width`, the first of them number `first`; a short last one is filled up.
int64_t keep_units(const float* c, int64_t n, int64_t width, int64_t first, Kept out) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += width) {
    const int64_t size = min64(width, n - i);
    if (!has_bit(c + i, size)) continue;
    float* const values = out.values + count * width;
    std::memcpy(values, c + i, static_cast<size_t>(size) * sizeof(float));
    std::fill(values + size, values + width, 0.0f);
    out.indices[count++] = static_cast<int32_t>(first + i / width);
  }
  return count;
}

}  // namespace

// Fills `buffer`, which has room for all units, with int32 indices and then the units' values, and
// returns how many are kept; -1 without memory. With `residual` the sum is taken, and the residual
// becomes 0: all of the sum is in the payload.
GW_EXPORT int64_t gw_nonzero(const float* grad, float* residual, int64_t n, int64_t width,
                             void* buffer, int threads) try {
  const int64_t num_units = ceil_div(n, width);
  const int64_t units = std::max<int64_t>(1, kBlock / width);  // of a block
  const int64_t num_blocks = ceil_div(num_units, units);
  int32_t* const indices = static_cast<int32_t*>(buffer);
  float* const values = reinterpret_cast<float*>(indices + num_units);
  std::vector<int64_t> counts(static_cast<size_t>(num_blocks));
  for_each_block(num_blocks, threads, [&](int64_t b) {
    const int64_t first = b * units * width;
    const int64_t size = min64(units * width, n - first);
    if (residual) {
      float* const r = residual + first;
      for (int64_t i = 0; i < size; ++i) r[i] += grad[first + i];
    }
    const float* const c = (residual ? residual : grad) + first;
    const Kept out{indices + b * units, values + first};
    counts[static_cast<size_t>(b)] = width == 1 ? keep_elements(c, size, first, out)
                                                : keep_units(c, size, width, b * units, out);
    if (residual) std::fill(residual + first, residual + first + size, 0.0f);
  });
  int64_t kept = 0;
  for (int64_t b = 0; b < num_blocks; ++b) {  // to lower addresses, so nothing unread is hit
    const int64_t count = counts[static_cast<size_t>(b)];
    std::memmove(indices + kept, indices + b * units, static_cast<size_t>(count) * sizeof(int32_t));
    kept += count;
  }
  float* const packed = reinterpret_cast<float*>(indices + kept);
  int64_t placed = 0;
  for (int64_t b = 0; b < num_blocks; ++b) {
    const int64_t count = counts[static_cast<size_t>(b)] * width;
    std::memmove(packed + placed, values + b * units * width,
                 static_cast<size_t>(count) * sizeof(float));
    placed += count;
  }
  return kept;
} catch (const std::bad_alloc&) {
  return -1;
}
