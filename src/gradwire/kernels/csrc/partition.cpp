// partition: entries grouped by part and sorted by place. Definition: kernels/sparse/partition.py.
//
// A radix sort of (place, number in the list), digit by digit from the lowest; parts are then ranges
// of the sorted list. A sort that keeps the order of equal places has one result, however many
// threads share the work.
#include <new>
#include <vector>

#include "bits.h"
#include "permutation.h"

namespace {

using namespace gw;

constexpr int kDigitBits = 8;  // as many streams are written at a time as a core's cache has room for
constexpr int64_t kDigits = int64_t{1} << kDigitBits;
constexpr int64_t kBlock = 8192;         // entries whose places are found together
constexpr int64_t kLeastShared = 65536;  // entries that are worth waking a thread for

struct Keyed {
  uint32_t place;
  uint32_t number;
};

// Buffers that live as long as the calling thread, so that a training loop never allocates.
struct Scratch {
  std::vector<Keyed> sorted, other;
  std::vector<int64_t> starts;
};

Scratch& scratch() {
  thread_local Scratch buffers;
  return buffers;
}

void find_places(const int32_t* indices, int64_t count, const Permutation* permutation,
                 Keyed* found, int threads) {
  for_each_block(ceil_div(count, kBlock), threads, [&](int64_t b) {
    uint32_t places[kBlock];
    const int64_t first = b * kBlock, size = min64(kBlock, count - first);
    std::memcpy(places, indices + first, static_cast<size_t>(size) * sizeof(uint32_t));
    if (permutation) permutation->map<false>(places, size);
    for (int64_t i = 0; i < size; ++i) {
      found[first + i] = {places[i], static_cast<uint32_t>(first + i)};
    }
  });
}

// One digit: tasks have ranges of the list, and write in their order within each digit.
void sort_digit(const Keyed* from, Keyed* to, int64_t count, int shift, int64_t num_tasks,
                int64_t* starts, int threads) {
  const auto digit = [shift](const Keyed& one) { return one.place >> shift & (kDigits - 1); };
  for_each_block(num_tasks, threads, [&](int64_t task) {
    int64_t* const counts = starts + task * kDigits;
    const int64_t stop = (task + 1) * count / num_tasks;
    std::memset(counts, 0, kDigits * sizeof(int64_t));
    for (int64_t i = task * count / num_tasks; i < stop; ++i) ++counts[digit(from[i])];
  });
  int64_t sum = 0;
  for (int64_t d = 0; d < kDigits; ++d) {
    for (int64_t task = 0; task < num_tasks; ++task) {
      const int64_t own = starts[task * kDigits + d];
      starts[task * kDigits + d] = sum;
      sum += own;
    }
  }
  for_each_block(num_tasks, threads, [&](int64_t task) {
    int64_t* const at = starts + task * kDigits;
    const int64_t stop = (task + 1) * count / num_tasks;
    for (int64_t i = task * count / num_tasks; i < stop; ++i) to[at[digit(from[i])]++] = from[i];
  });
}

// Sorts scratch().sorted by place.
void sort(int64_t count, int64_t num_units, int threads) {
  Scratch& s = scratch();
  const int64_t num_tasks = count < kLeastShared || threads < 1 ? 1 : threads;
  kept_room(s.other, count);
  int64_t* const starts = kept_room(s.starts, num_tasks * kDigits);
  for (int shift = 0; shift < 31 && (num_units - 1) >> shift; shift += kDigitBits) {
    sort_digit(s.sorted.data(), s.other.data(), count, shift, num_tasks, starts, threads);
    s.sorted.swap(s.other);
  }
}

// Local places, and units in their order; a unit's size is known to the compiler if `kUnitBytes`.
template <int64_t kUnitBytes>
void write_part(const Keyed* sorted, int64_t first, int64_t stop, uint32_t first_place,
                const uint8_t* given, int64_t given_bytes, int32_t* places, uint8_t* values) {
  const int64_t unit_bytes = kUnitBytes ? kUnitBytes : given_bytes;
  for (int64_t i = first; i < stop; ++i) {
    places[i] = static_cast<int32_t>(sorted[i].place - first_place);
    std::memcpy(values + i * unit_bytes, given + sorted[i].number * unit_bytes,
                static_cast<size_t>(unit_bytes));
  }
}

}  // namespace

// Entries of part 0, of part 1 and so on to `places` and `values_out`, those of a part by ascending
// place, and how many each part has to `totals`. Returns -1, the position of the first index outside
// [0, num_units), or kNoMemory.
GW_EXPORT int64_t gw_partition(const int32_t* indices, const uint8_t* values, int64_t count,
                               int64_t unit_bytes, int64_t num_units, int64_t length,
                               int64_t world, const uint32_t* permutation_given, int32_t* places,
                               uint8_t* values_out, int64_t* totals, int threads) try {
  const int64_t bad = find_outside(indices, count, num_units);
  if (bad >= 0) return bad;
  Keyed* const found = kept_room(scratch().sorted, count);
  static const uint32_t nothing[3 + 3 * kRounds] = {};
  const Permutation permutation(permutation_given ? permutation_given : nothing);
  find_places(indices, count, permutation_given ? &permutation : nullptr, found, threads);
  sort(count, num_units, threads);
  const Keyed* const sorted = scratch().sorted.data();
  const auto write = unit_bytes == 4 ? write_part<4> : write_part<0>;
  int64_t first = 0;
  for (int64_t part = 0; part < world; ++part) {
    int64_t stop = first;
    while (stop < count && sorted[stop].place < (part + 1) * length) ++stop;
    totals[part] = stop - first;
    write(sorted, first, stop, static_cast<uint32_t>(part * length), values, unit_bytes, places,
          values_out);
    first = stop;
  }
  return -1;
} catch (const std::bad_alloc&) {
  return kNoMemory;
}

// permutation: `count` int32 words mapped forwards or back. Returns as gw_partition.
GW_EXPORT int64_t gw_permute(const int32_t* given, int64_t count, const uint32_t* permutation_given,
                             int inverse, int32_t* out, int threads) {
  const Permutation permutation(permutation_given);
  const int64_t bad = find_outside(given, count, permutation.numel);
  if (bad >= 0) return bad;
  for_each_block(ceil_div(count, kBlock), threads, [&](int64_t b) {
    const int64_t first = b * kBlock, size = min64(kBlock, count - first);
    uint32_t* const at = reinterpret_cast<uint32_t*>(out + first);
    if (out != given) std::memcpy(at, given + first, static_cast<size_t>(size) * sizeof(uint32_t));
    inverse ? permutation.map<true>(at, size) : permutation.map<false>(at, size);
  });
  return -1;
}
