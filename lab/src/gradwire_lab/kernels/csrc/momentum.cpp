// Momentum correction's two passes. Definition: the torch reference in momentum.py.
//
// Loops are written so that compilers vectorise them; nothing contracts a product and a sum into
// one rounding, so the bits are the reference's.
#include <atomic>
#include <cmath>
#include <limits>

#include "blocks.h"

namespace {

using namespace gw;

constexpr int64_t kBlock = 16384;
constexpr int64_t kStrip = 16;

inline float within_range(float x) {
  constexpr float kMost = std::numeric_limits<float>::max();
  x = x < kMost ? x : kMost;
  return x > -kMost ? x : -kMost;
}

template <bool kNesterov, bool kWhole>
void accumulate(const float* __restrict g, float* __restrict u, float* __restrict v,
                float* __restrict whole, int64_t n, float m) {
  for (int64_t i = 0; i < n; ++i) {
    const float kept = m * u[i];
    const float next = finite_or_zero(kept + g[i]);
    const float sum = within_range(v[i] + (kNesterov ? m * next : kept));
    u[i] = next;
    v[i] = sum;
    if (kWhole) whole[i] = sum + g[i];
  }
}

// Whether an element of a block stayed: what was pending still is, and is not too small to count.
bool any_stayed(const float* __restrict whole, const float* __restrict pending, int64_t n,
                float least) {
  int32_t stayed = 0;
  for (int64_t i = 0; i < n; ++i) {
    stayed |= (whole[i] == pending[i]) & (std::fabs(whole[i]) >= least);
  }
  return stayed != 0;
}

// Of a sparse message most velocity is neither read nor written: a strip is a line of the cache.
void clear_left(float* __restrict velocity, const float* __restrict whole,
                const float* __restrict pending, int64_t n) {
  const auto clear = [&](int64_t i, int64_t count) {
    int32_t left = 0;
    for (int64_t j = i; j < i + count; ++j) left |= whole[j] != pending[j];
    if (!left) return;
    for (int64_t j = i; j < i + count; ++j) {
      velocity[j] = whole[j] == pending[j] ? velocity[j] : 0.0f;
    }
  };
  int64_t i = 0;
  for (; i + kStrip <= n; i += kStrip) clear(i, kStrip);
  if (i < n) clear(i, n - i);
}

}  // namespace

GW_EXPORT void gw_momentum_accumulate(const float* g, float* u, float* v, float* whole, int64_t n,
                                      float m, int nesterov, int threads) {
  for_each_block(ceil_div(n, kBlock), threads, [&](int64_t b) {
    const int64_t first = b * kBlock;
    const int64_t size = min64(kBlock, n - first);
    const auto run = nesterov ? (whole ? accumulate<true, true> : accumulate<true, false>)
                              : (whole ? accumulate<false, true> : accumulate<false, false>);
    run(g + first, u + first, v + first, whole ? whole + first : nullptr, size, m);
  });
}

GW_EXPORT void gw_momentum_mask(float* velocity, const float* whole, const float* pending,
                                int64_t n, float least, int threads) {
  const int64_t num_blocks = ceil_div(n, kBlock);
  const auto size_of = [&](int64_t b) { return min64(kBlock, n - b * kBlock); };
  std::atomic<bool> stayed{false};
  for_each_block(num_blocks, threads, [&](int64_t b) {
    if (stayed.load(std::memory_order_relaxed)) return;  // mostly the first block tells
    const int64_t first = b * kBlock;
    if (any_stayed(whole + first, pending + first, size_of(b), least)) stayed.store(true);
  });
  if (!stayed.load()) return;
  for_each_block(num_blocks, threads, [&](int64_t b) {
    const int64_t first = b * kBlock;
    const int64_t size = size_of(b);
    clear_left(velocity + first, whole + first, pending + first, size);
  });
}
