// Bitmaps: bit i is bit i % 8 of byte i / 8; on this byte order that is bit i % 64 of word i / 64.
#pragma once

#include <vector>

#include "blocks.h"

namespace gw {

constexpr int64_t kWords = 512;  // of a block
constexpr int64_t kRun = 1024;   // places that are handled together
constexpr int64_t kNoMemory = -2;
constexpr int64_t kStray = -3;  // a bit is set behind the last place

// A bit for each place of a part.
struct Bits {
  const uint8_t* bytes;
  int64_t num_places;

  int64_t num_bytes() const { return ceil_div(num_places, 8); }
  int64_t num_words() const { return ceil_div(num_places, 64); }
  int64_t num_blocks() const { return ceil_div(num_words(), kWords); }

  // Of the last word some bytes may be missing; words may lie anywhere.
  uint64_t word(int64_t at) const {
    uint64_t found = 0;
    const int64_t left = num_bytes() - at * 8;
    if (left >= 8) {
      std::memcpy(&found, bytes + at * 8, 8);  // of a size known to the compiler: one load
    } else {
      std::memcpy(&found, bytes + at * 8, static_cast<size_t>(left));
    }
    return found;
  }
  int64_t count_block(int64_t block) const {
    const int64_t stop = min64((block + 1) * kWords, num_words());
    int64_t sum = 0;
    for (int64_t i = block * kWords; i < stop; ++i) sum += __builtin_popcountll(word(i));
    return sum;
  }
  bool strays() const {
    const int64_t used = num_places % 8;
    return used && bytes[num_bytes() - 1] >> used;
  }
};

// Calls take(places, count) for the set bits of a block, ascending, in runs of about kRun. A word's
// bits are written by fours, whether there or not: how many there are could not be foretold.
template <class Take>
inline void for_each_run(const Bits& bits, int64_t block, const Take& take) {
  const int64_t stop = min64((block + 1) * kWords, bits.num_words());
  uint32_t places[kRun + 68];
  int64_t count = 0;
  for (int64_t i = block * kWords; i < stop; ++i) {
    uint64_t word = bits.word(i);
    const uint32_t first = static_cast<uint32_t>(i * 64);
    uint32_t* to = places + count;
    count += __builtin_popcountll(word);
    for (; word; to += 4) {
      for (int j = 0; j < 4; ++j) {
        to[j] = first + static_cast<uint32_t>(__builtin_ctzll(word | uint64_t{1} << 63));
        word &= word - 1;
      }
    }
    if (count < kRun) continue;
    take(places, count);
    count = 0;
  }
  if (count) take(places, count);
}

// Fills `starts` with where each block's first entry lies, and returns how many bits are set.
inline int64_t count_blocks(const Bits& bits, int threads, int64_t* starts) {
  if (bits.strays()) return kStray;
  for_each_block(bits.num_blocks(), threads,
                 [&](int64_t block) { starts[block] = bits.count_block(block); });
  int64_t sum = 0;
  for (int64_t block = 0; block < bits.num_blocks(); ++block) {
    const int64_t count = starts[block];
    starts[block] = sum;
    sum += count;
  }
  return sum;
}

// The position of the first place that is below the one before it or not below `num_places`, or -1.
inline int64_t find_disorder(const int32_t* places, int64_t count, int64_t num_places) {
  bool ascending = count == 0 || (places[0] >= 0 && places[count - 1] < num_places);
  for (int64_t i = 1; i < count; ++i) ascending &= places[i] >= places[i - 1];
  if (ascending) return -1;
  int64_t i = 0;
  while (places[i] < num_places && places[i] >= (i ? places[i - 1] : 0)) ++i;
  return i;
}

// Room for `count` that lives as long as the calling thread.
template <class T>
inline T* kept_room(std::vector<T>& room, int64_t count) {
  if (static_cast<int64_t>(room.size()) < count) room.resize(static_cast<size_t>(count));
  return room.data();
}

}  // namespace gw
