// Entries written or added to a dense vector. Definitions: the torch references of scatter_add in
// select.py, and of scatter_entries in kernels/sparse/scatter.py.
#include "permutation.h"

namespace {

using namespace gw;

constexpr int64_t kBlock = 16384;  // elements
constexpr int64_t kRun = 1024;     // places that are mapped together
constexpr int64_t kAhead = 24;     // writes that are on their way from memory
constexpr int64_t kLeastShared = 65536;  // what fewer elements take is less than to wake a thread

// Units of `width` to a vector of `n`; one that reaches beyond its end is cut. Their width is known
// to the compiler if it is `kWidth`.
template <bool kAdd, int64_t kWidth>
[[gnu::always_inline]] inline void put(const uint32_t* indices, const float* values, int64_t count,
                                       float* out, int64_t n, int64_t given_width, float scale) {
  const int64_t width = kWidth ? kWidth : given_width;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) __builtin_prefetch(out + indices[i + kAhead] * width, 1);
    const int64_t at = indices[i] * width, size = kWidth ? kWidth : min64(width, n - at);
    for (int64_t j = 0; j < size; ++j) {
      const float x = scale * values[i * width + j];
      out[at + j] = kAdd ? out[at + j] + x : x;
    }
  }
}

}  // namespace

// out[index * width + j] += scale * value for units of `width`; one that reaches beyond `n` is cut.
// Returns the position of the first index that names no unit, or -1 when all was added. Threads
// share the work only where no two of them can meet: in a strictly ascending list.
GW_EXPORT int64_t gw_scatter_add(const int32_t* indices, const float* values, int64_t k, float* out,
                                 int64_t n, int64_t width, float scale, int threads) {
  const int64_t num_units = ceil_div(n, width), units = ceil_div(kBlock, width);
  bool ascending = true;
  for (int64_t i = 0; i < k; ++i) {
    if (static_cast<uint32_t>(indices[i]) >= static_cast<uint64_t>(num_units)) return i;
    ascending &= i == 0 || indices[i] > indices[i - 1];
  }
  const int team = ascending && k * width > kLeastShared ? threads : 1;
  for_each_block(ceil_div(k, units), team, [&](int64_t b) {
    const int64_t first = b * units, size = min64(units, k - first);
    const uint32_t* const at = reinterpret_cast<const uint32_t*>(indices) + first;
    width == 1 ? put<true, 1>(at, values + first, size, out, n, 1, scale)
               : put<true, 0>(at, values + first * width, size, out, n, width, scale);
  });
  return -1;
}

// out[index] = scale * value for a list of local places. Returns -1, or the position of the first
// that is none.
GW_EXPORT int64_t gw_scatter(const int32_t* places, const float* values, int64_t count,
                             int64_t num_places, int64_t first_place,
                             const uint32_t* permutation_given, float* out, int64_t numel,
                             int64_t width, float scale, int threads) {
  const int64_t bad = find_outside(places, count, num_places);
  if (bad >= 0) return bad;
  static const uint32_t nothing[3 + 3 * kRounds] = {};
  const Permutation permutation(permutation_given ? permutation_given : nothing);
  for_each_block(ceil_div(count, kRun), threads, [&](int64_t batch) {
    uint32_t held[kRun];
    const int64_t from = batch * kRun, size = min64(kRun, count - from);
    for (int64_t i = 0; i < size; ++i) {
      held[i] = static_cast<uint32_t>(places[from + i] + first_place);
    }
    if (permutation_given) permutation.map<true>(held, size);
    const float* const v = values + from * width;
    width == 1 ? put<false, 1>(held, v, size, out, numel, 1, scale)
               : put<false, 0>(held, v, size, out, numel, width, scale);
  });
  return -1;
}
