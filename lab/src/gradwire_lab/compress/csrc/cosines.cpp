// The largest cosine coefficients of each chunk, and the way back. Definition: the torch reference
// in _cosines.py.
//
// A chunk is a matrix in the first cache, and its transform is two products with matrices. A product
// adds its terms in one order, and nothing contracts a product and a sum: the bits are the
// reference's.
#include <algorithm>
#include <atomic>
#include <new>
#include <vector>

#include "blocks.h"
#include "narrow.h"

namespace {

using namespace gw;

constexpr int64_t kSide = 64;  // the most rows and columns; every matrix has rows of so many

struct Matrix {
  alignas(64) float row[kSide][kSide];
};

// A basis: row k of `forward` is the k-th cosine of its transform; `back` is the transpose.
struct Basis {
  Matrix forward;
  Matrix back;
};

// out = a b, of which a has `rows` rows and `inner` columns.
void product(const Matrix& a, const Matrix& b, int64_t rows, int64_t inner, Matrix& out) {
  for (int64_t r = 0; r < rows; ++r) {
    float sum[kSide] = {};  // in registers: columns are a constant number
    for (int64_t k = 0; k < inner; ++k) {
      const float x = a.row[r][k];
      for (int64_t j = 0; j < kSide; ++j) sum[j] += x * b.row[k][j];
    }
    std::copy_n(sum, kSide, out.row[r]);
  }
}

// A vector, cut into whole chunks of side x side elements and a smaller one, and what is known of
// it: the bases of a whole chunk's rows and columns, and of the last one's rows and columns.
struct Task {
  const float* grad;
  float* residual;
  int32_t* places;
  float* values;
  int64_t n, side, keep;
  const Basis* whole;
  const Basis* last_rows;
  const Basis* last_columns;

  int64_t num_chunks() const { return ceil_div(n, side * side); }
};

// One chunk: elements from `first` on, which zeros fill up.
struct Chunk {
  Chunk(const Task& task, int64_t number) {
    const int64_t size = task.side * task.side;
    first = number * size;
    numel = min64(size, task.n - first);
    columns = min64(task.side, numel);
    rows = ceil_div(numel, columns);
    keep = ceil_div(task.keep * rows * columns, size);
    entry = number * task.keep;
    of_rows = numel < size ? task.last_rows : task.whole;
    of_columns = numel < size ? task.last_columns : task.whole;
  }
  int64_t size() const { return rows * columns; }

  int64_t first, numel, rows, columns, keep;
  int64_t entry;  // of its first coefficient among all entries
  const Basis* of_rows;
  const Basis* of_columns;
};

struct Scratch {
  Matrix matrix, between;
  float flat[kSide * kSide];
  Kept kept;
};

Scratch& scratch() {
  thread_local Scratch buffers;
  return buffers;
}

// The flat chunk becomes its coefficients, or with `back` these become the chunk.
void transform(Scratch& s, const Chunk& c, bool back) {
  std::memset(&s.matrix, 0, sizeof s.matrix);
  for (int64_t r = 0; r < c.rows; ++r) {
    std::copy_n(s.flat + r * c.columns, c.columns, s.matrix.row[r]);
  }
  const Matrix& left = back ? c.of_rows->back : c.of_rows->forward;
  const Matrix& right = back ? c.of_columns->forward : c.of_columns->back;
  product(left, s.matrix, c.rows, c.rows, s.between);
  product(s.between, right, c.rows, c.columns, s.matrix);
  for (int64_t r = 0; r < c.rows; ++r) {
    std::copy_n(s.matrix.row[r], c.columns, s.flat + r * c.columns);
  }
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

void encode(const Task& task, int64_t number, bool narrow) {
  Scratch& s = scratch();
  const Chunk c(task, number);
  const float* const grad = task.grad + c.first;
  float* const residual = task.residual ? task.residual + c.first : nullptr;
  for (int64_t i = 0; residual && i < c.numel; ++i) residual[i] = grad[i] + residual[i];
  std::copy_n(residual ? residual : grad, c.numel, s.flat);
  std::fill(s.flat + c.numel, s.flat + c.size(), 0.0f);
  transform(s, c, false);
  const Cut cut = find_cut(s.flat, c.size(), c.keep, s.kept);
  int32_t* const places = task.places + c.entry;
  float* const values = task.values + c.entry;
  const int32_t first = static_cast<int32_t>(c.first);
  list(s.flat, c.size(), cut, first, narrow, places, values);
  if (!residual) return;
  std::fill_n(s.flat, c.size(), 0.0f);
  for (int64_t i = 0; i < c.keep; ++i) s.flat[places[i] - first] = values[i];
  transform(s, c, true);
  for (int64_t i = 0; i < c.numel; ++i) residual[i] = finite_or_zero(residual[i] - s.flat[i]);
}

}  // namespace

// Encodes every task's vector; returns 0, or 1 when there was no memory for the buffers.
GW_EXPORT int gw_cosines_encode(const Task* tasks, int64_t num_tasks, int narrow, int threads) {
  try {
    std::vector<int64_t> firsts{0};
    int64_t numel = 0;
    for (int64_t i = 0; i < num_tasks; ++i) {
      firsts.push_back(firsts.back() + tasks[i].num_chunks());
      numel += tasks[i].n;
    }
    std::atomic<int> failed{0};
    for_each_block(firsts.back(), useful_threads(threads, 8 * numel), [&](int64_t block) {
      const auto behind = std::upper_bound(firsts.begin(), firsts.end(), block) - 1;
      try {
        encode(tasks[behind - firsts.begin()], block - *behind, narrow != 0);
      } catch (const std::bad_alloc&) {
        failed = 1;
      }
    });
    return failed;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// out = factor * (what the sums of `num_lists` lists of entries, the task's, decode to), or with
// `add` out grows by that. Returns -1, or the first list's entry of a chunk that has a place outside
// of it, whose elements are not written.
GW_EXPORT int64_t gw_cosines_decode(const Task* task, int64_t num_lists, int64_t num_entries,
                                    float* out, float factor, int add, int threads) {
  std::atomic<int64_t> bad{-1};
  for_each_block(task->num_chunks(), useful_threads(threads, 8 * task->n), [&](int64_t number) {
    Scratch& s = scratch();
    const Chunk c(*task, number);
    std::fill_n(s.flat, c.size(), 0.0f);
    for (int64_t l = 0; l < num_lists; ++l) {
      for (int64_t e = c.entry; e < c.entry + c.keep; ++e) {
        const int64_t at = task->places[l * num_entries + e] - c.first;
        if (at < 0 || at >= c.size()) {
          bad = e;
          return;
        }
        s.flat[at] += task->values[l * num_entries + e];
      }
    }
    transform(s, c, true);
    float* const to = out + c.first;
    for (int64_t i = 0; i < c.numel; ++i) {
      const float x = factor * s.flat[i];
      to[i] = add ? to[i] + x : x;
    }
  });
  return bad;
}
