// hashing: ZEN's algorithm 1, entries grouped by part through a hash table. Definition:
// kernels/hashing.py.
//
// All threads share the table. A cell holds an entry's number in the list; -1 marks an empty cell.
// Which thread comes first decides which cell an entry gets, so the order within a part may differ
// from run to run; a part's entries do not.
#include <algorithm>
#include <new>

#include "bits.h"
#include "permutation.h"

namespace {

using namespace gw;

constexpr int64_t kBlock = 8192;  // entries whose places are found together
constexpr int32_t kEmpty = -1;

struct Memory {
  int32_t* cells;      // of each part: `parallel` cells, then `serial` cells
  int64_t* counters;   // of each part: how many entries asked for a serial cell
  int32_t* spilled;    // entries for which serial memory was full
  int64_t num_spilled;
  int64_t parallel, serial;

  int64_t size() const { return parallel + serial; }
};

// MurmurHash3's finaliser over index and number, as in hashing_device.py.
uint32_t hashed(uint32_t index, uint32_t number) {
  uint32_t x = index ^ (number * 0x9E3779B9u);
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

// Lines 5 to 16 for one entry.
void put(Memory& memory, int32_t entry, uint32_t index, int64_t part, int rehashes) {
  int32_t* const own = memory.cells + part * memory.size();
  for (int i = 1; i <= rehashes; ++i) {
    const uint64_t hash = hashed(index, static_cast<uint32_t>(i));
    int32_t* const cell = own + (hash * static_cast<uint64_t>(memory.parallel) >> 32);
    int32_t expected = kEmpty;
    if (__atomic_compare_exchange_n(cell, &expected, entry, false, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED)) {
      return;
    }
  }
  const int64_t taken = __atomic_fetch_add(memory.counters + part, 1, __ATOMIC_RELAXED);
  if (taken < memory.serial) {
    own[memory.parallel + taken] = entry;
    return;
  }
  memory.spilled[__atomic_fetch_add(&memory.num_spilled, 1, __ATOMIC_RELAXED)] = entry;
}

struct Grouped {
  const uint8_t* values;
  int64_t unit_bytes;
  const int32_t* places;  // of each entry
  int64_t length;
  int32_t* places_out;
  uint8_t* values_out;

  void write(int64_t at, int32_t entry) const {
    places_out[at] = static_cast<int32_t>(places[entry] % length);
    std::memcpy(values_out + at * unit_bytes, values + entry * unit_bytes,
                static_cast<size_t>(unit_bytes));
  }
};

}  // namespace

// Entries of part 0, of part 1 and so on to `places_out` and `values_out`, those of a part in any
// order, and how many each part has to `totals`. To `spill` go the numbers of entries in serial memory
// and of those for which it was full. Returns as gw_partition.
GW_EXPORT int64_t gw_hash(const int32_t* indices, const uint8_t* values, int64_t count,
                          int64_t unit_bytes, int64_t num_units, int64_t length, int64_t world,
                          const uint32_t* permutation_given, int64_t rehashes, int64_t parallel,
                          int64_t serial, int32_t* places_out, uint8_t* values_out, int64_t* totals,
                          int64_t* spill, int threads) try {
  const int64_t bad = find_outside(indices, count, num_units);
  if (bad >= 0) return bad;
  thread_local std::vector<int32_t> places_held, spilled_held, table_held;
  int32_t* const places = kept_room(places_held, count);
  std::vector<int64_t> counters(static_cast<size_t>(world));
  int32_t* const table = kept_room(table_held, world * (parallel + serial));
  Memory memory{table, counters.data(), kept_room(spilled_held, count), 0, parallel, serial};
  for_each_block(world, threads, [&](int64_t part) {
    std::fill_n(table + part * memory.size(), memory.size(), kEmpty);
  });
  static const uint32_t nothing[3 + 3 * kRounds] = {};
  const Permutation permutation(permutation_given ? permutation_given : nothing);
  for_each_block(ceil_div(count, kBlock), threads, [&](int64_t b) {
    const int64_t first = b * kBlock, size = min64(kBlock, count - first);
    std::memcpy(places + first, indices + first, static_cast<size_t>(size) * sizeof(int32_t));
    if (permutation_given) {
      permutation.map<false>(reinterpret_cast<uint32_t*>(places + first), size);
    }
    for (int64_t i = first; i < first + size; ++i) {
      put(memory, static_cast<int32_t>(i), static_cast<uint32_t>(indices[i]), places[i] / length,
          static_cast<int>(rehashes));
    }
  });
  // Lines 19 to 23: the table is read twice, to count a part's entries and to write them.
  for_each_block(world, threads, [&](int64_t part) {
    const int32_t* const own = table + part * memory.size();
    totals[part] = memory.size() - std::count(own, own + memory.size(), kEmpty);
  });
  std::vector<int64_t> ends(static_cast<size_t>(world));
  for (int64_t i = 0; i < memory.num_spilled; ++i) {
    ++ends[static_cast<size_t>(places[memory.spilled[i]] / length)];
  }
  spill[0] = 0;
  spill[1] = memory.num_spilled;
  int64_t start = 0;
  for (int64_t part = 0; part < world; ++part) {
    spill[0] += min64(counters[static_cast<size_t>(part)], serial);
    int64_t& end = ends[static_cast<size_t>(part)];
    const int64_t from_table = totals[part];
    totals[part] += end;
    end = start + from_table;
    start += totals[part];
  }
  const Grouped grouped{values, unit_bytes, places, length, places_out, values_out};
  for_each_block(world, threads, [&](int64_t part) {
    int64_t at = ends[static_cast<size_t>(part)];
    const int32_t* const own = table + part * memory.size();
    for (int64_t i = memory.size() - 1; i >= 0; --i) {
      if (own[i] != kEmpty) grouped.write(--at, own[i]);
    }
  });
  for (int64_t i = 0; i < memory.num_spilled; ++i) {
    const int32_t entry = memory.spilled[i];
    grouped.write(ends[static_cast<size_t>(places[entry] / length)]++, entry);
  }
  return -1;
} catch (const std::bad_alloc&) {
  return kNoMemory;
}
