// fill: a dense vector from the hash bitmaps of all its parts, zeros elsewhere. Definition:
// sparse/formats/_bits.py.
//
// Places of a part lie anywhere in the vector, and so would the writes. So entries are first grouped
// by windows of the vector that fit a core's cache: pass one finds indices and counts those of each
// window, pass two moves entries to their window, pass three clears and writes window by window.
// Memory is then written from front to back, once. Indices are unique, so no order matters.
#include <new>

#include "bits.h"
#include "permutation.h"

namespace {

using namespace gw;

constexpr int kLeastShift = 16;         // a window of 2^16 elements: 256 KiB
constexpr int64_t kMostWindows = 1024;  // as many streams are written at a time
constexpr int64_t kMostTasks = 64;      // each has a count for every window
constexpr int64_t kAhead = 16;          // entries of a stream that are fetched before it is written

struct Entry {
  uint32_t index;
  float value;
};

// One part's payload.
struct Part {
  Bits bits;
  const float* values;
  int64_t count;
  int64_t first_place;
  int64_t first_block;  // of this part among those of all
  int64_t first_entry;
};

struct Scratch {
  std::vector<Part> parts;
  std::vector<int64_t> block_starts, window_starts;
  std::vector<uint32_t> indices;
  std::vector<Entry> entries;
};

Scratch& scratch() {
  thread_local Scratch buffers;
  return buffers;
}

// The work of passes one and two: blocks of bits, those of a task one behind the other.
struct Blocks {
  const Part* parts;
  int64_t num_parts;
  int64_t num_blocks;
  int64_t num_tasks;
  const int64_t* starts;  // of the blocks of each part, within the part

  // Calls work(part, block of the part) for the blocks of a task.
  template <class Work>
  void for_each(int64_t task, const Work& work) const {
    int64_t block = task * num_blocks / num_tasks;
    const int64_t stop = (task + 1) * num_blocks / num_tasks;
    int64_t p = 0;
    while (p + 1 < num_parts && parts[p + 1].first_block <= block) ++p;
    for (; block < stop; ++block) {
      while (block - parts[p].first_block >= parts[p].bits.num_blocks()) ++p;
      work(parts[p], block - parts[p].first_block);
    }
  }
  int64_t first_entry(const Part& part, int64_t block) const {
    return part.first_entry + starts[part.first_block + block];
  }
  int64_t end_entry(const Part& part, int64_t block) const {
    const bool last = block + 1 == part.bits.num_blocks();
    return last ? part.first_entry + part.count : first_entry(part, block + 1);
  }
};

// Windows of the vector, and where in `entries` each task writes those of each window.
struct Windows {
  int shift;
  int64_t number;
  int64_t* starts;  // [task * number + window]

  int64_t* of(int64_t task) const { return starts + task * number; }
};

int window_shift(int64_t numel) {
  int shift = kLeastShift;
  while (ceil_div(numel, int64_t{1} << shift) > kMostWindows) ++shift;
  return shift;
}

// Fills scratch().parts, and scratch().block_starts with where the entries of each block lie in its
// part. Returns -1, or the number of the first part whose set bits are not its entries.
int64_t take_parts(const uint8_t* const* bits, const float* const* values, const int64_t* lengths,
                   const int64_t* counts, int64_t num_parts, int threads) {
  Scratch& s = scratch();
  Part* const parts = kept_room(s.parts, num_parts);
  int64_t place = 0, num_blocks = 0, num_entries = 0;
  for (int64_t p = 0; p < num_parts; ++p) {
    parts[p] = {{bits[p], lengths[p]}, values[p], counts[p], place, num_blocks, num_entries};
    place += lengths[p];
    num_blocks += parts[p].bits.num_blocks();
    num_entries += counts[p];
  }
  int64_t* const starts = kept_room(s.block_starts, num_blocks);
  for (int64_t p = 0; p < num_parts; ++p) {
    if (count_blocks(parts[p].bits, threads, starts + parts[p].first_block) != counts[p]) return p;
  }
  return -1;
}

// Pass one: the entries' indices in the order of places, and how many of each task are in a window.
void find_indices(const Blocks& blocks, const Windows& windows, const Permutation* permutation,
                  uint32_t* indices, int threads) {
  for_each_block(blocks.num_tasks, threads, [&](int64_t task) {
    int64_t* const counts = windows.of(task);
    std::memset(counts, 0, static_cast<size_t>(windows.number) * sizeof(int64_t));
    blocks.for_each(task, [&](const Part& part, int64_t block) {
      uint32_t* to = indices + blocks.first_entry(part, block);
      for_each_run(part.bits, block, [&](uint32_t* run, int64_t size) {
        for (int64_t i = 0; i < size; ++i) run[i] += static_cast<uint32_t>(part.first_place);
        if (permutation) permutation->map<true>(run, size);
        for (int64_t i = 0; i < size; ++i) ++counts[run[i] >> windows.shift];
        std::memcpy(to, run, static_cast<size_t>(size) * sizeof(uint32_t));
        to += size;
      });
    });
  });
}

// Counts become where each task writes, window by window.
void scan(int64_t num_tasks, const Windows& windows) {
  int64_t sum = 0;
  for (int64_t window = 0; window < windows.number; ++window) {
    for (int64_t task = 0; task < num_tasks; ++task) {
      const int64_t own = windows.of(task)[window];
      windows.of(task)[window] = sum;
      sum += own;
    }
  }
}

// Pass two: entries to their windows.
void move_entries(const Blocks& blocks, const Windows& windows, const uint32_t* indices,
                  float scale, Entry* entries, int threads) {
  for_each_block(blocks.num_tasks, threads, [&](int64_t task) {
    int64_t* const starts = windows.of(task);
    blocks.for_each(task, [&](const Part& part, int64_t block) {
      const int64_t stop = blocks.end_entry(part, block);
      for (int64_t i = blocks.first_entry(part, block); i < stop; ++i) {
        Entry* const to = entries + starts[indices[i] >> windows.shift]++;
        __builtin_prefetch(to + kAhead, 1);
        *to = {indices[i], scale * part.values[i - part.first_entry]};
      }
    });
  });
}

// Pass three. A window's last writer has moved on to where the next window starts.
void write_windows(const Entry* entries, const int64_t* ends, const Windows& windows, float* out,
                   int64_t numel, int threads) {
  for_each_block(windows.number, threads, [&](int64_t window) {
    const int64_t first = window << windows.shift;
    const int64_t size = min64(int64_t{1} << windows.shift, numel - first);
    std::memset(out + first, 0, static_cast<size_t>(size) * sizeof(float));
    for (int64_t i = window ? ends[window - 1] : 0; i < ends[window]; ++i) {
      out[entries[i].index] = entries[i].value;
    }
  });
}

}  // namespace

// `bits`, `values`, `lengths` (places) and `counts` (entries) of each part, in the order of places,
// which are `numel` in all. Returns -1, kNoMemory, or the number of the first part whose set bits
// are not its entries; nothing is written then.
GW_EXPORT int64_t gw_bits_fill(const uint8_t* const* bits, const float* const* values,
                               const int64_t* lengths, const int64_t* counts, int64_t num_parts,
                               const uint32_t* permutation_given, float* out, int64_t numel,
                               float scale, int threads) try {
  if (numel == 0) return -1;
  const int64_t wrong = take_parts(bits, values, lengths, counts, num_parts, threads);
  if (wrong >= 0) return wrong;
  Scratch& s = scratch();
  const Part& last = s.parts[static_cast<size_t>(num_parts - 1)];
  const int64_t num_blocks = last.first_block + last.bits.num_blocks();
  const int64_t num_entries = last.first_entry + last.count;
  const Blocks blocks{s.parts.data(), num_parts, num_blocks, min64(kMostTasks, num_blocks),
                      s.block_starts.data()};
  const int shift = window_shift(numel);
  const int64_t num_windows = ceil_div(numel, int64_t{1} << shift);
  const Windows windows{shift, num_windows,
                        kept_room(s.window_starts, blocks.num_tasks * num_windows)};
  uint32_t* const indices = kept_room(s.indices, num_entries);
  Entry* const entries = kept_room(s.entries, num_entries);
  static const uint32_t nothing[3 + 3 * kRounds] = {};
  const Permutation permutation(permutation_given ? permutation_given : nothing);
  find_indices(blocks, windows, permutation_given ? &permutation : nullptr, indices, threads);
  scan(blocks.num_tasks, windows);
  move_entries(blocks, windows, indices, scale, entries, threads);
  write_windows(entries, windows.of(blocks.num_tasks - 1), windows, out, numel, threads);
  return -1;
} catch (const std::bad_alloc&) {
  return kNoMemory;
}
