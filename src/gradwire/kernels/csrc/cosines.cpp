// The largest cosine coefficients of each chunk, and the way back. Definition: the torch reference
// in cosines.py.
//
// A chunk is a matrix in the first cache. Its columns are transformed by Lee's recursion (IEEE
// TASSP 1984), sixteen at a time, then it is transposed and transformed again. Coefficients stay
// transposed. Nothing contracts a product and a sum, so the bits are the reference's.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <new>
#include <vector>

#include "blocks.h"
#include "cut.h"
#include "narrow.h"

namespace {

using namespace gw;

constexpr int64_t kMostSide = 64;
constexpr int kStrip = 16;
constexpr int kFewRows = 16;

using Strip = float __attribute__((vector_size(kStrip * sizeof(float))));

// table[n / 2 - 1 + i] is 1 / (2 cos((i + 1/2) pi / n)).
template <int n>
struct Cosines {
  static constexpr int half = n / 2;

  static inline __attribute__((always_inline)) void split(const Strip* x, Strip* to,
                                                          const float* table) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) {
      const Strip a = x[i], b = x[n - 1 - i];
      to[i] = a + b;
      to[half + i] = (a - b) * table[half - 1 + i];
    }
  }

  static inline __attribute__((always_inline)) void weave(const Strip* from, Strip* x) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) {
      x[2 * i] = from[i];
      x[2 * i + 1] = i + 1 < half ? from[half + i] + from[half + i + 1] : from[half + i];
    }
  }

  static inline __attribute__((always_inline)) void unweave(const Strip* x, Strip* to) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) {
      to[i] = x[2 * i];
      to[half + i] = i ? x[2 * i - 1] + x[2 * i + 1] : x[1];
    }
  }

  static inline __attribute__((always_inline)) void join(const Strip* from, Strip* x,
                                                         const float* table) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) {
      const Strip even = from[i], odd = from[half + i] * table[half - 1 + i];
      x[i] = even + odd;
      x[n - 1 - i] = even - odd;
    }
  }

  // Of few rows all stays in registers.
  static inline __attribute__((always_inline)) void forward_few(Strip* x, const float* table) {
    Strip parts[n];
    split(x, parts, table);
    Cosines<half>::forward_few(parts, table);
    Cosines<half>::forward_few(parts + half, table);
    weave(parts, x);
  }

  static inline __attribute__((always_inline)) void inverse_few(Strip* x, const float* table) {
    Strip parts[n];
    unweave(x, parts);
    Cosines<half>::inverse_few(parts, table);
    Cosines<half>::inverse_few(parts + half, table);
    join(parts, x, table);
  }

  static void forward(Strip* x, const float* table) {
    Strip parts[n];
    if constexpr (n <= kFewRows) {
      std::copy(x, x + n, parts);
      forward_few(parts, table);
      std::copy(parts, parts + n, x);
    } else {
      split(x, parts, table);
      Cosines<half>::forward(parts, table);
      Cosines<half>::forward(parts + half, table);
      weave(parts, x);
    }
  }

  static void inverse(Strip* x, const float* table) {
    Strip parts[n];
    if constexpr (n <= kFewRows) {
      std::copy(x, x + n, parts);
      inverse_few(parts, table);
      std::copy(parts, parts + n, x);
    } else {
      unweave(x, parts);
      Cosines<half>::inverse(parts, table);
      Cosines<half>::inverse(parts + half, table);
      join(parts, x, table);
    }
  }
};

template <>
struct Cosines<1> {
  static void forward_few(Strip*, const float*) {}
  static void inverse_few(Strip*, const float*) {}
  static void forward(Strip*, const float*) {}
  static void inverse(Strip*, const float*) {}
};

using Transform = void (*)(Strip*, const float*);

template <bool kForward, int n>
Transform pick(int64_t rows) {
  if (rows == n) return kForward ? Cosines<n>::forward : Cosines<n>::inverse;
  if constexpr (n > 1) return pick<kForward, n / 2>(rows);
  return nullptr;
}

// Transforms every column of a rows x width matrix in place.
template <bool kForward>
void transform_columns(float* tile, int64_t rows, int64_t width, const float* table) {
  if (rows == 1) return;
  Strip x[kMostSide];
  const Transform run = pick<kForward, kMostSide>(rows);
  int64_t first = 0;
  for (; first + kStrip <= width; first += kStrip) {
    for (int64_t r = 0; r < rows; ++r) std::memcpy(&x[r], tile + r * width + first, sizeof(Strip));
    run(x, table);
    for (int64_t r = 0; r < rows; ++r) std::memcpy(tile + r * width + first, &x[r], sizeof(Strip));
  }
  if (first == width) return;
  const size_t bytes = static_cast<size_t>(width - first) * sizeof(float);
  std::memset(x, 0, sizeof x);
  for (int64_t r = 0; r < rows; ++r) std::memcpy(&x[r], tile + r * width + first, bytes);
  run(x, table);
  for (int64_t r = 0; r < rows; ++r) std::memcpy(tile + r * width + first, &x[r], bytes);
}

void transpose(const float* from, int64_t rows, int64_t width, float* to) {
#if defined(__AVX2__)
  if (rows % 4 == 0 && width % 4 == 0) {
    for (int64_t r = 0; r < rows; r += 4) {
      for (int64_t c = 0; c < width; c += 4) {
        __m128 a = _mm_loadu_ps(from + r * width + c);
        __m128 b = _mm_loadu_ps(from + (r + 1) * width + c);
        __m128 d = _mm_loadu_ps(from + (r + 2) * width + c);
        __m128 e = _mm_loadu_ps(from + (r + 3) * width + c);
        _MM_TRANSPOSE4_PS(a, b, d, e);
        _mm_storeu_ps(to + c * rows + r, a);
        _mm_storeu_ps(to + (c + 1) * rows + r, b);
        _mm_storeu_ps(to + (c + 2) * rows + r, d);
        _mm_storeu_ps(to + (c + 3) * rows + r, e);
      }
    }
    return;
  }
#endif
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < width; ++c) to[c * rows + r] = from[r * width + c];
  }
}

// One chunk: `numel` elements from `first` on, which fill up a rows x width matrix with zeros.
struct Chunk {
  int64_t first;
  int64_t numel;
  int64_t rows;
  int64_t width;
  int64_t keep;
  int64_t entry;  // of its first coefficient among all entries

  int64_t size() const { return rows * width; }
};

int64_t power_from(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

// How a vector is cut: whole chunks of side x side, then a smaller one.
struct Cutting {
  int64_t n, side, keep;

  int64_t num_chunks() const { return ceil_div(n, side * side); }

  Chunk chunk(int64_t number) const {
    const int64_t whole = side * side;
    const int64_t numel = min64(whole, n - number * whole);
    const bool is_whole = numel == whole;
    const int64_t width = numel < side ? power_from(numel) : side;
    const int64_t rows = is_whole ? side : power_from(ceil_div(numel, width));
    const int64_t kept = is_whole ? keep : ceil_div(keep * rows * width, whole);
    return {number * whole, numel, rows, width, kept, number * keep};
  }
};

// Factors that make a transform of n numbers orthonormal.
void factors(int64_t n, float* out) {
  out[0] = static_cast<float>(std::sqrt(1.0 / static_cast<double>(n)));
  std::fill(out + 1, out + n, static_cast<float>(std::sqrt(2.0 / static_cast<double>(n))));
}

struct Tile {
  alignas(64) float whole[kMostSide * kMostSide];
  alignas(64) float spectrum[kMostSide * kMostSide];
  Kept kept;
};

Tile& tile() {
  thread_local Tile buffers;
  return buffers;
}

void scale(float* spectrum, const Chunk& c) {
  float rows[kMostSide], columns[kMostSide];
  factors(c.rows, rows);
  factors(c.width, columns);
  for (int64_t w = 0; w < c.width; ++w) {
    for (int64_t r = 0; r < c.rows; ++r) spectrum[w * c.rows + r] *= columns[w] * rows[r];
  }
}

// whole (rows x width) to spectrum (width x rows); whole is lost.
void to_spectrum(Tile& t, const Chunk& c, const float* table) {
  transform_columns<true>(t.whole, c.rows, c.width, table);
  transpose(t.whole, c.rows, c.width, t.spectrum);
  transform_columns<true>(t.spectrum, c.width, c.rows, table);
  scale(t.spectrum, c);
}

void from_spectrum(Tile& t, const Chunk& c, const float* table) {
  scale(t.spectrum, c);
  transform_columns<false>(t.spectrum, c.width, c.rows, table);
  transpose(t.spectrum, c.width, c.rows, t.whole);
  transform_columns<false>(t.whole, c.rows, c.width, table);
}

// The nearest bfloat16, ties to even; a NaN stays one.
inline float rounded16(float x) {
  const uint32_t bits = bits_of(x);
  if (key_of(x) > kInfKey) return x;
  return float_of((bits + 0x7fffu + (bits >> 16 & 1)) & 0xffff0000u);
}

// Lists the coefficients that the cut takes, in ascending order of their places.
void list(const float* spectrum, int64_t size, const Cut& cut, int32_t first, bool narrow,
          int32_t* places, float* values) {
  constexpr int64_t kRun = 64;
  int64_t ties = cut.num_ties, done = 0;
  for (int64_t start = 0; start < size; start += kRun) {
    const int64_t stop = min64(size, start + kRun);
    int32_t any = 0;
    for (int64_t i = start; i < stop; ++i) any |= key_of(spectrum[i]) >= cut.key;
    for (int64_t i = start; any && i < stop; ++i) {
      const uint32_t key = key_of(spectrum[i]);
      if (key < cut.key || (key == cut.key && ties-- <= 0)) continue;
      places[done] = first + static_cast<int32_t>(i);
      values[done++] = narrow ? rounded16(spectrum[i]) : spectrum[i];
    }
  }
}

// One vector to encode.
struct Task {
  const float* grad;
  float* residual;
  int64_t n, side, keep;
  int32_t* places;
  float* values;
};

void encode(const Task& task, int64_t number, bool narrow, const float* table) {
  Tile& t = tile();
  const Chunk c = Cutting{task.n, task.side, task.keep}.chunk(number);
  const float* const grad = task.grad + c.first;
  float* const residual = task.residual ? task.residual + c.first : nullptr;
  if (residual) {
    for (int64_t i = 0; i < c.numel; ++i) residual[i] = grad[i] + residual[i];
  }
  std::copy(residual ? residual : grad, (residual ? residual : grad) + c.numel, t.whole);
  std::fill(t.whole + c.numel, t.whole + c.size(), 0.0f);
  to_spectrum(t, c, table);
  const Cut cut = find_cut(t.spectrum, c.size(), c.keep, t.kept);
  int32_t* const places = task.places + c.entry;
  float* const values = task.values + c.entry;
  const int32_t first = static_cast<int32_t>(c.first);
  list(t.spectrum, c.size(), cut, first, narrow, places, values);
  if (!residual) return;
  std::fill(t.spectrum, t.spectrum + c.size(), 0.0f);
  for (int64_t i = 0; i < c.keep; ++i) t.spectrum[places[i] - first] = values[i];
  from_spectrum(t, c, table);
  for (int64_t i = 0; i < c.numel; ++i) residual[i] = finite_or_zero(residual[i] - t.whole[i]);
}

}  // namespace

// Encodes every task's vector; returns 0, or 1 when there was no memory for the buffers.
GW_EXPORT int gw_cosines_encode(const Task* tasks, int64_t num_tasks, int narrow,
                                const float* table, int threads) {
  try {
    std::vector<int64_t> firsts{0};
    int64_t numel = 0;
    for (int64_t i = 0; i < num_tasks; ++i) {
      const Task& task = tasks[i];
      firsts.push_back(firsts.back() + Cutting{task.n, task.side, task.keep}.num_chunks());
      numel += task.n;
    }
    std::atomic<int> failed{0};
    for_each_block(firsts.back(), useful_threads(threads, 8 * numel), [&](int64_t block) {
      const auto behind = std::upper_bound(firsts.begin(), firsts.end(), block) - 1;
      try {
        encode(tasks[behind - firsts.begin()], block - *behind, narrow != 0, table);
      } catch (const std::bad_alloc&) {
        failed = 1;
      }
    });
    return failed;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// out = factor * (what the sums of `num_lists` lists of entries decode to), or with `add` out grows
// by that. Returns -1, or the first list's entry of a chunk that has a place outside of it, whose
// elements are not written.
GW_EXPORT int64_t gw_cosines_decode(const int32_t* places, const float* values, int64_t num_lists,
                                    int64_t num_entries, float* out, int64_t n, int64_t side,
                                    int64_t keep, float factor, int add, const float* table,
                                    int threads) {
  const Cutting cutting{n, side, keep};
  std::atomic<int64_t> bad{-1};
  for_each_block(cutting.num_chunks(), useful_threads(threads, 8 * n), [&](int64_t number) {
    Tile& t = tile();
    const Chunk c = cutting.chunk(number);
    std::fill(t.spectrum, t.spectrum + c.size(), 0.0f);
    for (int64_t l = 0; l < num_lists; ++l) {
      for (int64_t e = c.entry; e < c.entry + c.keep; ++e) {
        const int64_t at = places[l * num_entries + e] - c.first;
        if (at < 0 || at >= c.size()) {
          bad = e;
          return;
        }
        t.spectrum[at] += values[l * num_entries + e];
      }
    }
    from_spectrum(t, c, table);
    float* const to = out + c.first;
    if (add) {
      for (int64_t i = 0; i < c.numel; ++i) to[i] += factor * t.whole[i];
    } else {
      for (int64_t i = 0; i < c.numel; ++i) to[i] = factor * t.whole[i];
    }
  });
  return bad;
}
