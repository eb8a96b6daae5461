// The k largest of a vector by |c|, exactly: their cut, and their list. Definition: the torch
// reference in select.py.
//
// The rank of an element is its bit pattern without the sign (its key), which orders NaN above inf
// above the finite. Where few of many elements are selected, a sample estimates a threshold that a
// few more than k of them pass; one pass over memory collects those, and the k-th key is found
// exactly among them. Where many are selected, a sample estimates two keys that the k-th lies
// between; one pass finds it there, a second lists what reaches it. A few thousand elements need no
// estimate. Where estimates fail (hostile data), the whole vector is narrowed by one thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include "blocks.h"
#include "narrow.h"

namespace gw {

// ---- one pass over memory that collects what reaches a threshold --------------------------------

constexpr int64_t kBlock = 16384;  // elements of a block; its candidates fit a local buffer

// Where a block's candidates lie. Without indices they are consecutive elements from `first`.
struct Part {
  const float* values;
  const int32_t* indices;
  int64_t count;
  int64_t first;

  int32_t index(int64_t i) const { return indices ? indices[i] : static_cast<int32_t>(first + i); }
};

inline int64_t num_candidates(const std::vector<Part>& parts) {
  int64_t total = 0;
  for (const Part& part : parts) total += part.count;
  return total;
}

// Where candidates lie between the pass that finds them and the one that lists them.
struct Pool {
  std::vector<float> values;
  std::vector<int32_t> indices;

  void reserve(int64_t capacity) {
    if (static_cast<int64_t>(values.size()) >= capacity) return;
    values.resize(static_cast<size_t>(capacity));
    indices.resize(static_cast<size_t>(capacity));
  }
};

struct LocalBuffer {
  float values[kBlock + 16];
  int32_t indices[kBlock + 16];
};

inline LocalBuffer& local_buffer() {
  thread_local std::unique_ptr<LocalBuffer> buffer(new LocalBuffer);
  return *buffer;
}

// Collects a block's elements whose key reaches the threshold; with kAccumulate r = g + r first.
template <bool kAccumulate>
int64_t filter_block(const float* g, float* r, int64_t n, int64_t first, uint32_t threshold,
                     LocalBuffer& out) {
  int64_t count = 0;
  int64_t i = 0;
#ifdef GW_AVX512
  const __m512i bound = _mm512_set1_epi32(static_cast<int>(threshold));
  const __m512i no_sign = _mm512_set1_epi32(0x7fffffff);
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i index = _mm512_add_epi32(lane, _mm512_set1_epi32(static_cast<int>(first)));
  for (; i + 16 <= n; i += 16) {
    __m512 c = _mm512_loadu_ps(g + i);
    prefetch_ahead(g + i);
    if (kAccumulate) {
      prefetch_ahead(r + i);
      c = _mm512_add_ps(c, _mm512_loadu_ps(r + i));
      _mm512_storeu_ps(r + i, c);
    }
    const __m512i key = _mm512_and_si512(_mm512_castps_si512(c), no_sign);
    const __mmask16 pass = _mm512_cmpge_epi32_mask(key, bound);
    _mm512_storeu_ps(out.values + count, _mm512_maskz_compress_ps(pass, c));
    _mm512_storeu_si512(out.indices + count, _mm512_maskz_compress_epi32(pass, index));
    count += __builtin_popcount(pass);
    index = _mm512_add_epi32(index, _mm512_set1_epi32(16));
  }
#endif
  for (; i < n; ++i) {
    const float c = kAccumulate ? g[i] + r[i] : g[i];
    if (kAccumulate) r[i] = c;
    out.values[count] = c;
    out.indices[count] = static_cast<int32_t>(first + i);
    count += key_of(c) >= threshold;
  }
  return count;
}

// What a pass reads: c = g, or c = g + r, which it leaves in r.
struct Operands {
  const float* g;
  float* r;
  int64_t n;
  int threads;
};

// Lists what reaches the threshold, a part for each block; returns how much that is. What is beyond
// the capacity is not listed: the parts are void then.
inline int64_t filter(const Operands& c, uint32_t threshold, int64_t capacity, Pool& pool,
                      std::vector<Part>& parts) {
  const int64_t num_blocks = ceil_div(c.n, kBlock);
  pool.reserve(capacity);
  parts.resize(static_cast<size_t>(num_blocks));
  std::atomic<int64_t> used{0};
  for_each_block(num_blocks, c.threads, [&](int64_t b) {
    LocalBuffer& local = local_buffer();
    const int64_t first = b * kBlock;
    const int64_t size = min64(kBlock, c.n - first);
    const int64_t count =
        c.r ? filter_block<true>(c.g + first, c.r + first, size, first, threshold, local)
            : filter_block<false>(c.g + first, nullptr, size, first, threshold, local);
    // The place in the pool depends on timing, the order of the parts does not.
    const int64_t place = used.fetch_add(count, std::memory_order_relaxed);
    if (place + count > capacity) return;
    float* const values = pool.values.data() + place;
    int32_t* const indices = pool.indices.data() + place;
    std::memcpy(values, local.values, static_cast<size_t>(count) * sizeof(float));
    std::memcpy(indices, local.indices, static_cast<size_t>(count) * sizeof(int32_t));
    parts[static_cast<size_t>(b)] = {values, indices, count, 0};
  });
  return used.load();
}

// ---- estimates from a sample of keys: where the k-th largest of a long vector is about -----------

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

namespace {

using namespace gw;

constexpr int64_t kFewShare = 8;  // where fewer than this share of elements are selected

// Buffers that live as long as the calling thread, so that a training loop never allocates.
struct Scratch {
  Pool pool;
  std::vector<Part> parts;
  std::vector<int64_t> num_above, num_equal;
  Sample sample;
  Kept kept;
};

Scratch& scratch() {
  thread_local Scratch buffers;
  return buffers;
}

// The vector itself as candidates.
void take_all(const float* c, int64_t n) {
  std::vector<Part>& parts = scratch().parts;
  parts.resize(static_cast<size_t>(ceil_div(n, kBlock)));
  for (size_t b = 0; b < parts.size(); ++b) {
    const int64_t first = static_cast<int64_t>(b) * kBlock;
    parts[b] = {c + first, nullptr, min64(kBlock, n - first), first};
  }
}

// Writes a part's selected elements; the first `num_ties` of those at the cut are.
void emit_part(const Part& part, uint32_t cut, int64_t num_ties, int64_t num_out,
               int32_t* out_indices, float* out_values) {
  int64_t done = 0;
  int64_t i = 0;
#ifdef GW_AVX512
  const __m512i bound = _mm512_set1_epi32(static_cast<int>(cut));
  const __m512i no_sign = _mm512_set1_epi32(0x7fffffff);
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (; i + 16 <= part.count && done < num_out; i += 16) {
    const __m512i bits = _mm512_loadu_si512(part.values + i);
    const __m512i key = _mm512_and_si512(bits, no_sign);
    const __m512i index = part.indices ? _mm512_loadu_si512(part.indices + i)
                                       : _mm512_add_epi32(lane, _mm512_set1_epi32(part.index(i)));
    const uint32_t lowest = (1u << min64(num_ties, 16)) - 1;
    const uint32_t ties = _pdep_u32(lowest, _mm512_cmpeq_epi32_mask(key, bound));
    const uint32_t take = _mm512_cmpgt_epi32_mask(key, bound) | ties;
    const __mmask16 mask = static_cast<__mmask16>(take);
    if (done + 16 <= num_out) {  // the faster way, which writes beyond what is taken
      _mm512_storeu_si512(out_values + done, _mm512_maskz_compress_epi32(mask, bits));
      _mm512_storeu_si512(out_indices + done, _mm512_maskz_compress_epi32(mask, index));
    } else if (mask) {
      _mm512_mask_compressstoreu_epi32(out_values + done, mask, bits);
      _mm512_mask_compressstoreu_epi32(out_indices + done, mask, index);
    }
    num_ties -= __builtin_popcount(ties);
    done += __builtin_popcount(take);
  }
#endif
  for (; done < num_out; ++i) {  // without a branch: where half are taken, none is foreseen
    const uint32_t key = key_of(part.values[i]);
    const bool is_tie = (key == cut) & (num_ties > 0);
    out_values[done] = part.values[i];
    out_indices[done] = part.index(i);
    num_ties -= is_tie;
    done += (key > cut) | is_tie;
  }
}

void count_part(const Part& part, uint32_t cut, int64_t& num_above, int64_t& num_equal) {
  int32_t above = 0, equal = 0;
  for (int64_t i = 0; i < part.count; ++i) {
    const int32_t key = static_cast<int32_t>(key_of(part.values[i]));
    above += key > static_cast<int32_t>(cut);
    equal += key == static_cast<int32_t>(cut);
  }
  num_above = above;
  num_equal = equal;
}

// Selected entries leave the residual, and so does whatever is not finite.
void clear_residual(const Part& part, const int32_t* selected, int64_t num_selected, bool any_inf,
                    float* residual) {
  for (int64_t i = 0; any_inf && i < part.count; ++i) {
    if (key_of(part.values[i]) >= kInfKey) residual[part.index(i)] = 0.0f;
  }
  constexpr int64_t kAhead = 16;
  for (int64_t i = 0; i < num_selected; ++i) {
    if (i + kAhead < num_selected) __builtin_prefetch(residual + selected[i + kAhead], 1);
    residual[selected[i]] = 0.0f;
  }
}

// Lists the k that the cut takes of the candidates, in the order of the vector.
void emit(const Cut& cut, int64_t k, float* residual, int32_t* indices, float* values,
          int threads) {
  Scratch& s = scratch();
  const int64_t num_parts = static_cast<int64_t>(s.parts.size());
  s.num_above.assign(s.parts.size(), k - cut.num_ties);  // which is so of a single part
  s.num_equal.assign(s.parts.size(), cut.num_ties);
  const int counting = useful_threads(threads, num_candidates(s.parts));
  for_each_block(num_parts > 1 ? num_parts : 0, counting, [&](int64_t p) {
    const size_t at = static_cast<size_t>(p);
    count_part(s.parts[at], cut.key, s.num_above[at], s.num_equal[at]);
  });
  // In place: num_above becomes the part's first output, num_equal the ties it selects.
  int64_t first = 0;
  int64_t ties_left = cut.num_ties;
  for (size_t p = 0; p < s.parts.size(); ++p) {
    const int64_t ties = min64(s.num_equal[p], ties_left);
    const int64_t above = s.num_above[p];
    s.num_above[p] = first;
    s.num_equal[p] = ties;
    ties_left -= ties;
    first += above + ties;
  }
  for_each_block(num_parts, threads, [&](int64_t p) {
    const size_t at = static_cast<size_t>(p);
    const int64_t start = s.num_above[at];
    const int64_t end = p + 1 < num_parts ? s.num_above[at + 1] : first;
    emit_part(s.parts[at], cut.key, s.num_equal[at], end - start, indices + start, values + start);
    if (residual) {
      clear_residual(s.parts[at], indices + start, end - start, cut.key >= kInfKey, residual);
    }
  });
}

void accumulate(const float* g, float* r, int64_t n, int threads) {
  for_each_block(ceil_div(n, kBlock), threads, [&](int64_t b) {
    const int64_t end = min64((b + 1) * kBlock, n);
    for (int64_t i = b * kBlock; i < end; ++i) r[i] = g[i] + r[i];
  });
}

// Keeps the band's keys in the pool, in any order, as far as they fit, and counts those above.
Split split_blocks(const float* c, int64_t n, Band band, int64_t capacity, int threads) {
  Pool& pool = scratch().pool;
  pool.reserve(capacity);
  std::atomic<int64_t> num_above{0}, num_kept{0};
  for_each_block(ceil_div(n, kBlock), threads, [&](int64_t b) {
    LocalBuffer& local = local_buffer();
    const Split found = split(c + b * kBlock, min64(kBlock, n - b * kBlock), band, local.values);
    num_above.fetch_add(found.num_above, std::memory_order_relaxed);
    const int64_t place = num_kept.fetch_add(found.num_kept, std::memory_order_relaxed);
    if (place + found.num_kept > capacity) return;
    std::memcpy(pool.values.data() + place, local.values,
                static_cast<size_t>(found.num_kept) * sizeof(float));
  });
  return {num_above, num_kept};
}

// With all of c as candidates: for few elements, or where many of them are selected.
Cut choose_whole(const float* c, int64_t n, int64_t k, int threads) {
  Scratch& s = scratch();
  take_all(c, n);
  if (n <= kBlock) return find_cut(c, n, k, s.kept);
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    const Band band = plan_band(s.sample, {c, nullptr}, n, k, attempt);
    const int64_t capacity = n / 2;
    const Split found = split_blocks(c, n, band, capacity, threads);
    const int64_t left = k - found.num_above;
    if (left < 1 || left > found.num_kept) continue;
    if (band.low == band.high) return {band.low, left};
    if (found.num_kept <= capacity) {
      return find_cut(s.pool.values.data(), found.num_kept, left, s.kept);
    }
  }
  const Cut cut = find_cut(c, n, k, s.kept);
  s.kept = Kept();  // of two vectors: what hardly ever happens keeps no memory
  return cut;
}

// Leaves the candidates in scratch().parts and returns the cut.
Cut choose(const float* g, float* r, int64_t n, int64_t k, int threads) {
  Scratch& s = scratch();
  bool accumulated = r == nullptr;
  const float* const c = r ? r : g;
  const bool few = n > kBlock && k < n / kFewShare;
  for (int attempt = 0; few && attempt < kMaxAttempts; ++attempt) {
    const Source source = accumulated ? Source{c, nullptr} : Source{g, r};
    const ThresholdPlan plan = plan_threshold(s.sample, source, n, k, attempt);
    const Operands operands = {accumulated ? c : g, accumulated ? nullptr : r, n, threads};
    const int64_t num_passed = filter(operands, plan.threshold, plan.capacity, s.pool, s.parts);
    accumulated = true;
    if (num_passed >= k && num_passed <= plan.capacity) {
      return find_cut(s.pool.values.data(), num_passed, k, s.kept);
    }
    if (num_passed < k && plan.threshold == 1) {  // the rest of the k are zeros
      take_all(c, n);
      return {0, k - num_passed};
    }
  }
  if (!accumulated) accumulate(g, r, n, threads);
  return choose_whole(c, n, k, threads);
}

}  // namespace
