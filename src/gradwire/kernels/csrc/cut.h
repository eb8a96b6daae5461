// The k-th largest key among candidates, exactly, by radix histograms.
#pragma once

#include <vector>

#include "blocks.h"

namespace gw {

constexpr uint32_t kInfKey = 0x7f800000u;
constexpr int kDigitBits = 11;
constexpr uint32_t kNumDigits = 1u << kDigitBits;
constexpr int kNumCopies = 2;

// What elements are ranked by: the bit pattern without the sign.
inline uint32_t key_of(float x) { return bits_of(x) & 0x7fffffffu; }

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

// Waking a thread for less than this costs more than it saves.
inline int useful_threads(int threads, int64_t num_elements) {
  return static_cast<int>(min64(threads, num_elements / (int64_t{1} << 19) + 1));
}

// One digit of keys whose digits above it are known to be `prefix`.
struct Digit {
  uint32_t prefix;
  int prefix_shift;
  int shift;
};

// Histograms, kept between calls.
struct Counts {
  std::vector<uint32_t> copies;
  std::vector<uint32_t> bins;
};

// Fills counts.bins with how often each value of the digit occurs. Neighbours count in different
// copies of the histogram: where few values occur, adding to one counter twice in a row waits for
// the first add.
inline void count_digit(const std::vector<Part>& parts, const Digit& digit, int threads,
                        Counts& counts) {
  const int64_t num_parts = static_cast<int64_t>(parts.size());
  const int64_t num_tasks = min64(useful_threads(threads, num_candidates(parts)), num_parts);
  counts.copies.assign(static_cast<size_t>(num_tasks) * kNumCopies * kNumDigits, 0);
  for_each_block(num_tasks, threads, [&](int64_t task) {
    uint32_t* const copies = counts.copies.data() + task * kNumCopies * kNumDigits;
    const uint32_t first = digit.prefix << (digit.prefix_shift - digit.shift);
    for (int64_t p = task * num_parts / num_tasks; p < (task + 1) * num_parts / num_tasks; ++p) {
      const Part& part = parts[static_cast<size_t>(p)];
      for (int64_t i = 0; i < part.count; ++i) {
        const uint32_t key = key_of(part.values[i]);
        if (key >> digit.prefix_shift != digit.prefix) continue;
        const uint32_t bin = (key >> digit.shift) - first;
        ++copies[(i % kNumCopies) * kNumDigits + bin];
      }
    }
  });
  counts.bins.assign(kNumDigits, 0);
  for (size_t first = 0; first < counts.copies.size(); first += kNumDigits) {
    for (size_t bin = 0; bin < kNumDigits; ++bin) counts.bins[bin] += counts.copies[first + bin];
  }
}

// The bin that holds the `left`-th largest; `left` becomes its rank within that bin.
inline uint32_t find_bin(const std::vector<uint32_t>& bins, int64_t& left) {
  uint32_t bin = kNumDigits - 1;
  for (; bin > 0 && bins[bin] < left; --bin) left -= bins[bin];
  return bin;
}

struct Cut {
  uint32_t key;      // the k-th largest
  int64_t num_ties;  // how many elements of that very key are selected
};

// The cut that takes the k largest, by counting the three digits of their keys.
inline Cut count_cut(const std::vector<Part>& parts, int64_t k, int threads, Counts& counts) {
  int64_t left = k;
  uint32_t key = 0;
  int prefix_shift = 31;
  for (const int shift : {20, 9, 0}) {
    count_digit(parts, {key, prefix_shift, shift}, threads, counts);
    key = (key << (prefix_shift - shift)) + find_bin(counts.bins, left);
    prefix_shift = shift;
  }
  return {key, left};
}

}  // namespace gw
