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
  int64_t end_entry(const Part& part, int64_t block, int64_t count) const {
    const bool last = block + 1 == part.bits.num_blocks();
    return last ? part.first_entry + count : first_entry(part, block + 1);
  }
};

// Pass one of a block: its entries' indices, counted by window.
void find_indices(const Part& part, int64_t block, const Permutation* permutation, int shift,
                  uint32_t* indices, int64_t* counts) {
  for_each_run(part.bits, block, [&](uint32_t* run, int64_t size) {
    for (int64_t i = 0; i < size; ++i) run[i] += static_cast<uint32_t>(part.first_place);
    if (permutation) permutation->map<true>(run, size);
    for (int64_t i = 0; i < size; ++i) ++counts[run[i] >> shift];
    std::memcpy(indices, run, static_cast<size_t>(size) * sizeof(uint32_t));
    indices += size;
  });
}

// Counts of each task and window become where it writes, window by window.
void scan(int64_t num_tasks, int64_t num_windows, int64_t* counts) {
  int64_t sum = 0;
  for (int64_t window = 0; window < num_windows; ++window) {
    for (int64_t task = 0; task < num_tasks; ++task) {
      const int64_t own = counts[task * num_windows + window];
      counts[task * num_windows + window] = sum;
      sum += own;
    }
  }
}

}  // namespace

// `bits`, `values`, `lengths` (places) and `counts` (entries) of each part, in the order of places.
// Returns -1, kNoMemory, or the number of the first part whose set bits are not its entries; nothing
// is written then.
GW_EXPORT int64_t gw_bits_fill(const uint8_t* const* bits, const float* const* values,
                               const int64_t* lengths, const int64_t* entry_counts,
                               int64_t num_parts, const uint32_t* permutation_given, float* out,
                               int64_t numel, float scale, int threads) try {
  Scratch& s = scratch();
  Part* const parts = kept_room(s.parts, num_parts);
  int64_t place = 0, num_blocks = 0, num_entries = 0;
  for (int64_t p = 0; p < num_parts; ++p) {
    parts[p] = {{bits[p], lengths[p]}, values[p], place, num_blocks, num_entries};
    place += lengths[p];
    num_blocks += parts[p].bits.num_blocks();
    num_entries += entry_counts[p];
  }
  int64_t* const block_starts = kept_room(s.block_starts, num_blocks);
  for (int64_t p = 0; p < num_parts; ++p) {
    int64_t* const own = block_starts + parts[p].first_block;
    if (count_blocks(parts[p].bits, threads, own) != entry_counts[p]) return p;
  }
  int shift = kLeastShift;
  while (ceil_div(numel, int64_t{1} << shift) > kMostWindows) ++shift;
  const int64_t num_windows = ceil_div(numel, int64_t{1} << shift);
  const Blocks blocks{parts, num_parts, num_blocks, min64(kMostTasks, num_blocks), block_starts};
  int64_t* const starts = kept_room(s.window_starts, (blocks.num_tasks + 1) * num_windows);
  uint32_t* const indices = kept_room(s.indices, num_entries);
  Entry* const entries = kept_room(s.entries, num_entries);
  static const uint32_t nothing[3 + 3 * kRounds] = {};
  const Permutation permutation(permutation_given ? permutation_given : nothing);
  for_each_block(blocks.num_tasks, threads, [&](int64_t task) {
    int64_t* const own = starts + task * num_windows;
    std::memset(own, 0, static_cast<size_t>(num_windows) * sizeof(int64_t));
    blocks.for_each(task, [&](const Part& part, int64_t block) {
      find_indices(part, block, permutation_given ? &permutation : nullptr, shift,
                   indices + blocks.first_entry(part, block), own);
    });
  });
  scan(blocks.num_tasks, num_windows, starts);
  for_each_block(blocks.num_tasks, threads, [&](int64_t task) {
    int64_t* const own = starts + task * num_windows;
    blocks.for_each(task, [&](const Part& part, int64_t block) {
      const int64_t stop = blocks.end_entry(part, block, entry_counts[&part - parts]);
      for (int64_t i = blocks.first_entry(part, block); i < stop; ++i) {
        const float value = part.values[i - part.first_entry];
        Entry* const to = entries + own[indices[i] >> shift]++;
        __builtin_prefetch(to + kAhead, 1);
        *to = {indices[i], scale * value};
      }
    });
  });
  // Each window's last writer has moved on to where the next window starts.
  const int64_t* const ends = starts + (blocks.num_tasks - 1) * num_windows;
  for_each_block(num_windows, threads, [&](int64_t window) {
    const int64_t first = window << shift, size = min64(int64_t{1} << shift, numel - first);
    std::memset(out + first, 0, static_cast<size_t>(size) * sizeof(float));
    for (int64_t i = window ? ends[window - 1] : 0; i < ends[window]; ++i) {
      out[entries[i].index] = entries[i].value;
    }
  });
  return -1;
} catch (const std::bad_alloc&) {
  return kNoMemory;
}
