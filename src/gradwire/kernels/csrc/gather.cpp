// Values at listed elements, which leave the residual. Definition: the torch reference in gather.py.
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
