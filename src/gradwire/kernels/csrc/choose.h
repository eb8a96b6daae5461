// The k largest of a vector by |c|, exactly: their cut, and their list. Definition: the torch
// reference in select.py.
//
// The rank of an element is its bit pattern without the sign (its key), which orders NaN above inf
// above the finite. Where few of many elements are selected, a sample estimates a threshold that a
// few more than k of them pass; one pass over memory collects those, and the k-th key is found
// exactly among them. Where many are selected, a sample estimates two keys that the k-th lies
// between; one pass finds it there, a second lists what reaches it. A few thousand elements need no
// estimate. Where estimates fail (hostile data), a radix histogram runs over the whole vector.
#pragma once

#include <algorithm>
#include <atomic>
#include <new>
#include <vector>

#include "blocks.h"
#include "cut.h"
#include "filter.h"
#include "narrow.h"
#include "sample.h"

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
  Counts counts;
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
  return count_cut(s.parts, k, threads, s.counts);
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
