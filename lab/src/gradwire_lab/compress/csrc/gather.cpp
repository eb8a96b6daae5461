// Values at listed elements, which leave the residual, and runs of numbers laid out elsewhere.
// Definition: the torch references in _gather.py.
#include "blocks.h"

namespace {
constexpr int64_t kBlock = 16384;
constexpr int64_t kAhead = 32;
}  // namespace

// Returns the position of the first index outside [0, n), or -1 when all was taken. Indices differ,
// so no two threads meet.
GW_EXPORT int64_t gw_take(const float* source, const int32_t* indices, int64_t k, int64_t n,
                          float scale, float* values, float* residual, int threads) {
  using namespace gw;
  for (int64_t i = 0; i < k; ++i) {
    if (static_cast<uint32_t>(indices[i]) >= static_cast<uint64_t>(n)) return i;
  }
  for_each_block(ceil_div(k, kBlock), threads, [&](int64_t block) {
    const int64_t end = min64((block + 1) * kBlock, k);
    for (int64_t i = block * kBlock; i < end; ++i) {
      if (i + kAhead < end) {
        __builtin_prefetch(source + indices[i + kAhead]);
        if (residual) __builtin_prefetch(residual + indices[i + kAhead], 1);
      }
      values[i] = scale * source[indices[i]];
      if (residual) residual[indices[i]] = 0.0f;
    }
  });
  return -1;
}

// Run r of the numbers, counts[r] of them behind those of the run before, goes to out + tos[r], with
// shifts[r] added; without numbers a run counts up from its shift. Runs do not overlap in `out`.
GW_EXPORT void gw_lay_runs(const int32_t* numbers, const int64_t* counts, const int64_t* tos,
                           const int64_t* shifts, int64_t num_runs, int32_t* out) {
  for (int64_t r = 0; r < num_runs; ++r) {
    const int32_t shift = static_cast<int32_t>(shifts[r]);
    int32_t* const to = out + tos[r];
    for (int64_t i = 0; i < counts[r]; ++i) {
      to[i] = (numbers ? numbers[i] : static_cast<int32_t>(i)) + shift;
    }
    if (numbers) numbers += counts[r];
  }
}
