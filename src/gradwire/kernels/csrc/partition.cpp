// partition: entries grouped by part, in two passes. Definition: sparse/partition.py.
//
// A part is cut into windows of places, and entries are grouped by window. Pass one maps indices to
// places and counts, block by block, how many fall into each window; a scan over blocks and windows
// says where each block writes; pass two writes. Blocks are of fixed size and write in the order of
// the list, so the result does not depend on the number of threads.
#include <new>
#include <vector>

#include "blocks.h"
#include "permutation.h"

namespace {

using namespace gw;

constexpr int64_t kBlock = 8192;

// Where the entries of a part go.
struct Slot {
  int32_t* places;
  uint8_t* values;
};

// Buffers that live as long as the calling thread, so that a training loop never allocates.
struct Scratch {
  std::vector<uint32_t> places;
  std::vector<int64_t> starts;
  std::vector<Slot> slots;
};

Scratch& scratch() {
  thread_local Scratch buffers;
  return buffers;
}

int64_t round_up(int64_t bytes, int64_t step) { return ceil_div(bytes, step) * step; }

struct Entries {
  const int32_t* indices;
  const uint8_t* values;
  int64_t count;
  int64_t unit_bytes;
};

// Entries of all parts one behind the other.
void lay_grouped(const int64_t* counts, int64_t world, int64_t unit_bytes, int32_t* places,
                 uint8_t* values, std::vector<Slot>& slots) {
  for (int64_t part = 0; part < world; ++part) {
    slots[static_cast<size_t>(part)] = {places, values};
    places += counts[part];
    values += counts[part] * unit_bytes;
  }
}

// One coo payload a part: places, then values aligned to their own size; slots of 8 bytes.
void lay_slots(const int64_t* counts, int64_t world, int64_t unit_bytes, int64_t item_bytes,
               uint8_t* buffer, std::vector<Slot>& slots) {
  for (int64_t part = 0; part < world; ++part) {
    const int64_t indices_end = counts[part] * 4;
    const int64_t values_at = round_up(indices_end, item_bytes);
    const int64_t end = values_at + counts[part] * unit_bytes;
    std::memset(buffer + indices_end, 0, static_cast<size_t>(values_at - indices_end));
    slots[static_cast<size_t>(part)] = {reinterpret_cast<int32_t*>(buffer), buffer + values_at};
    buffer += round_up(end, 8);
  }
}

// Which part a place is in, and which window of it.
struct Windows {
  uint32_t length;  // of a part
  int shift;        // a window has 2^shift places
  int64_t each;     // windows of a part
  Divider part_of;

  Windows(int64_t part_length, int window_shift)
      : length(static_cast<uint32_t>(part_length)),
        shift(window_shift),
        each(((part_length - 1) >> window_shift) + 1),
        part_of(length) {}
  int64_t window_of(uint32_t place, uint32_t part) const {
    return part * each + ((place - part * length) >> shift);
  }
};

// Pass one: places into scratch, counts of block b and window w into starts[b * num_windows + w].
void count_windows(const Entries& in, const Permutation* permutation, const Windows& windows,
                   int64_t num_windows, int threads) {
  Scratch& s = scratch();
  uint32_t* const places = s.places.data();
  int64_t* const counts = s.starts.data();
  for_each_block(ceil_div(in.count, kBlock), threads, [&](int64_t b) {
    const int64_t first = b * kBlock, size = min64(kBlock, in.count - first);
    uint32_t* const at = places + first;
    std::memcpy(at, in.indices + first, static_cast<size_t>(size) * sizeof(uint32_t));
    if (permutation) permutation->map<false>(at, size);
    int64_t* const own = counts + b * num_windows;
    std::memset(own, 0, static_cast<size_t>(num_windows) * sizeof(int64_t));
    for (int64_t i = 0; i < size; ++i) ++own[windows.window_of(at[i], windows.part_of(at[i]))];
  });
}

// Counts become first positions within each part; `totals` gets the parts' sums.
void scan(int64_t num_blocks, int64_t world, int64_t each, int64_t* counts, int64_t* totals) {
  for (int64_t part = 0; part < world; ++part) {
    int64_t sum = 0;
    for (int64_t window = part * each; window < (part + 1) * each; ++window) {
      for (int64_t b = 0; b < num_blocks; ++b) {
        const int64_t own = counts[b * world * each + window];
        counts[b * world * each + window] = sum;
        sum += own;
      }
    }
    totals[part] = sum;
  }
}

// Pass two of one block; a unit's size is known to the compiler where it is `kUnitBytes`.
template <int64_t kUnitBytes>
void write_block(const Entries& in, const uint32_t* places, int64_t first, int64_t stop,
                 const Windows& windows, int64_t* starts, const Slot* slots) {
  const size_t unit_bytes = static_cast<size_t>(kUnitBytes ? kUnitBytes : in.unit_bytes);
  for (int64_t i = first; i < stop; ++i) {
    const uint32_t part = windows.part_of(places[i]);
    const size_t at = static_cast<size_t>(starts[windows.window_of(places[i], part)]++);
    slots[part].places[at] = static_cast<int32_t>(places[i] - part * windows.length);
    std::memcpy(slots[part].values + at * unit_bytes,
                in.values + static_cast<size_t>(i) * unit_bytes, unit_bytes);
  }
}

void write_parts(const Entries& in, const Windows& windows, int64_t num_windows, int threads) {
  Scratch& s = scratch();
  const uint32_t* const places = s.places.data();
  const Slot* const slots = s.slots.data();
  int64_t* const starts = s.starts.data();
  const auto write = in.unit_bytes == 4 ? write_block<4> : write_block<0>;
  for_each_block(ceil_div(in.count, kBlock), threads, [&](int64_t b) {
    const int64_t first = b * kBlock;
    write(in, places, first, min64(first + kBlock, in.count), windows, starts + b * num_windows,
          slots);
  });
}

}  // namespace

// With `places`, grouped entries are written there and to `values_out`; else slots of coo payloads
// to `values_out`. Returns -1, the position of the first index outside [0, num_units), or -2 where
// there was no memory.
GW_EXPORT int64_t gw_partition(const int32_t* indices, const uint8_t* values, int64_t count,
                               int64_t unit_bytes, int64_t item_bytes, int64_t num_units,
                               int64_t length, int window_shift, int64_t world,
                               const uint32_t* permutation_given, int32_t* places,
                               uint8_t* values_out, int64_t* totals, int threads) try {
  const int64_t bad = find_outside(indices, count, num_units);
  if (bad >= 0) return bad;
  const Entries in{indices, values, count, unit_bytes};
  const Windows windows(length, window_shift);
  const int64_t num_blocks = ceil_div(count, kBlock), num_windows = world * windows.each;
  Scratch& s = scratch();
  if (static_cast<int64_t>(s.places.size()) < count) s.places.resize(static_cast<size_t>(count));
  s.starts.resize(static_cast<size_t>(num_blocks * num_windows));
  s.slots.resize(static_cast<size_t>(world));
  if (permutation_given) {
    const Permutation permutation(permutation_given);
    count_windows(in, &permutation, windows, num_windows, threads);
  } else {
    count_windows(in, nullptr, windows, num_windows, threads);
  }
  scan(num_blocks, world, windows.each, s.starts.data(), totals);
  if (places) {
    lay_grouped(totals, world, unit_bytes, places, values_out, s.slots);
  } else {
    lay_slots(totals, world, unit_bytes, item_bytes, values_out, s.slots);
  }
  write_parts(in, windows, num_windows, threads);
  return -1;
} catch (const std::bad_alloc&) {
  return -2;
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
