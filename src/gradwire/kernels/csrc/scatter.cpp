// Entries added to a dense vector. Definition: the torch reference of scatter_add in select.py.
#include "blocks.h"

namespace {

using namespace gw;

constexpr int64_t kBlock = 16384;  // elements
constexpr int64_t kAhead = 32;
constexpr int64_t kLeastShared = 65536;  // what fewer elements take is less than to wake a thread

void add_elements(const int32_t* indices, const float* values, int64_t first, int64_t end, float* out,
                  float scale) {
  for (int64_t i = first; i < end; ++i) {
    if (i + kAhead < end) __builtin_prefetch(out + indices[i + kAhead], 1);
    out[indices[i]] += scale * values[i];
  }
}

void add_units(const int32_t* indices, const float* values, int64_t first, int64_t end, float* out,
               int64_t n, int64_t width, float scale) {
  for (int64_t i = first; i < end; ++i) {
    if (i + kAhead < end) __builtin_prefetch(out + indices[i + kAhead] * width, 1);
    const int64_t start = indices[i] * width, size = min64(width, n - start);
    for (int64_t j = 0; j < size; ++j) out[start + j] += scale * values[i * width + j];
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
    const int64_t first = b * units, end = min64(first + units, k);
    if (width == 1) {
      add_elements(indices, values, first, end, out, scale);
    } else {
      add_units(indices, values, first, end, out, n, width, scale);
    }
  });
  return -1;
}
