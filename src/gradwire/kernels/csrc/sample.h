// Estimates from a sample of keys: where the k-th largest of a long vector is about.
#pragma once

#include <vector>

#include "blocks.h"
#include "cut.h"
#include "filter.h"
#include "narrow.h"

namespace gw {

constexpr int kMaxAttempts = 2;
constexpr double kLeastSampled = 16.0;

// Buffers for a sample, and for ranking it.
struct Sample {
  std::vector<float> values;
  Kept kept;
};

// The elements that are ranked: a, or a + b before the residual was accumulated.
struct Source {
  const float* a;
  const float* b;

  float at(int64_t i) const { return b ? a[i] + b[i] : a[i]; }
  void prefetch(int64_t i) const {
    __builtin_prefetch(a + i);
    if (b) __builtin_prefetch(b + i);
  }
};

inline uint64_t mixed(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Sampled keys that cost least in all: of m, what is ranked beyond the k-th in vain is as
// sqrt(k * n / m), so m is as the cube root of k * n. The factor is measured, and flat.
inline int64_t worth_sampling(int64_t n, int64_t k) {
  const double product = static_cast<double>(n) * static_cast<double>(k);
  return static_cast<int64_t>(4.0 * __builtin_cbrt(product));
}

// A sample of keys, in `sample.values`: runs of `run` neighbours, one at a random place of each
// stratum. Returns how many keys that are.
inline int64_t draw_sample(Sample& sample, const Source& source, int64_t n, int64_t k,
                           int attempt) {
  const int64_t run = attempt == 0 ? 16 : 4;
  const int64_t most = attempt == 0 ? min64(worth_sampling(n, k) / run + 1, 8192) : 65536;
  const int64_t num_runs = min64(n / 256, most);
  const int64_t stratum = n / num_runs;
  const auto run_start = [&](int64_t r) {
    const uint64_t random = mixed(static_cast<uint64_t>(r * kMaxAttempts + attempt)) >> 32;
    const uint64_t spot = (random * static_cast<uint64_t>(stratum - run + 1)) >> 32;
    return r * stratum + static_cast<int64_t>(spot);
  };
  constexpr int64_t kAhead = 8;
  int64_t starts[kAhead] = {};
  sample.values.resize(static_cast<size_t>(run * num_runs));
  float* to = sample.values.data();
  for (int64_t r = 0; r < num_runs + kAhead; ++r) {  // each run is fetched kAhead runs early
    const int64_t start = starts[r % kAhead];
    if (r < num_runs) {
      starts[r % kAhead] = run_start(r);
      source.prefetch(starts[r % kAhead]);
    }
    if (r < kAhead) continue;
    for (int64_t i = start; i < start + run; ++i) *to++ = source.at(i);
  }
  return run * num_runs;
}

// The key of this rank in the sample, counted from 1; beyond both ends what is beyond all keys.
inline uint32_t sampled_key(Sample& sample, int64_t rank) {
  const int64_t size = static_cast<int64_t>(sample.values.size());
  if (rank < 1) return kMaxKey;
  return rank > size ? 0 : find_cut(sample.values.data(), size, rank, sample.kept).key;
}

struct ThresholdPlan {
  uint32_t threshold;
  int64_t capacity;  // candidates there is room for
};

// A threshold that about k * (1 + margin) elements pass.
inline ThresholdPlan plan_threshold(Sample& sample, const Source& source, int64_t n, int64_t k,
                                    int attempt) {
  const double num_samples = static_cast<double>(draw_sample(sample, source, n, k, attempt));
  // So many that enough of them are in the sample: candidates beyond k are few and cost nothing.
  const double share = num_samples / static_cast<double>(n);
  const double least = kLeastSampled / share;
  const double sought = static_cast<double>(k) > least ? static_cast<double>(k) : least;
  const double margin = 5.0 / __builtin_sqrt(sought * share);
  const int64_t rank = static_cast<int64_t>(sought * share * (1.0 + margin)) + 1;
  const uint32_t key = sampled_key(sample, rank);
  // Zeros never are candidates: where they belong to the result, the lowest indices do. What is
  // not finite always is one: the residual must lose it even where it is not selected.
  const uint32_t threshold = key < 1 ? 1 : key < kInfKey ? key : kInfKey;
  return {threshold, static_cast<int64_t>(sought * (1.2 + 3.0 * margin)) + 1024};
}

// A band of keys that the k-th largest of n is in.
inline Band plan_band(Sample& sample, const Source& source, int64_t n, int64_t k, int attempt) {
  const double num_samples = static_cast<double>(draw_sample(sample, source, n, k, attempt));
  const double share = static_cast<double>(k) / static_cast<double>(n);
  const double rank = share * num_samples;
  const double margin = 5.0 * __builtin_sqrt(rank * (1.0 - share)) + 5.0;
  return {sampled_key(sample, static_cast<int64_t>(rank + margin)),
          sampled_key(sample, static_cast<int64_t>(rank - margin))};
}

}  // namespace gw
