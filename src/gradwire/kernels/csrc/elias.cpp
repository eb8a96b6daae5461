// elias: ascending places by the code of Elias and Fano. Definition: kernels/sparse/formats/elias_fano.py.
//
// The low `low_bits` of each place lie one behind the other; what is above them, plus the entry's
// number, is the bit that is set among the high ones. So the high bits are a bitmap with as many set
// bits as entries, and are read as one.
#include <new>

#include "bits.h"

namespace {

using namespace gw;

// Fields of `width` bits, 1 to 31, one behind the other from a byte on. Of the last word some
// bytes may be missing.
struct Packed {
  const uint8_t* bytes;
  int64_t num_bytes;
  int width;

  uint32_t at(int64_t i) const { return cut(i, min64(8, num_bytes - (i * width >> 3))); }

  // Adds field `first + i` to the `size` places, which are multiples of 2^width.
  void add_to(int32_t* places, int64_t first, int64_t size) const {
    const int64_t whole = (num_bytes - 8) * 8 / width - first;  // have 8 bytes left
    int64_t i = 0;
    const int64_t stop = min64(whole, size);
    for (; i < stop; ++i) places[i] |= static_cast<int32_t>(cut(first + i, 8));
    for (; i < size; ++i) places[i] |= static_cast<int32_t>(at(first + i));
  }

 private:
  uint32_t cut(int64_t i, int64_t num_there) const {
    const int64_t bit = i * width;
    uint64_t word = 0;
    std::memcpy(&word, bytes + (bit >> 3), static_cast<size_t>(num_there));
    return static_cast<uint32_t>(word >> (bit & 7)) & ((uint32_t{1} << width) - 1);
  }
};

// Entry i sets bit (place >> low_bits) + i. A word is written when the next one begins.
void set_high(const int32_t* places, int64_t count, int low_bits, uint8_t* high, int64_t num_high) {
  const int64_t num_bytes = ceil_div(num_high, 8);
  std::memset(high, 0, static_cast<size_t>(num_bytes));
  const auto write = [&](int64_t word, uint64_t bits) {
    std::memcpy(high + word * 8, &bits, static_cast<size_t>(min64(8, num_bytes - word * 8)));
  };
  int64_t current = 0;
  uint64_t held = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = (places[i] >> low_bits) + i;
    if (at >> 6 != current) {
      write(current, held);
      current = at >> 6;
      held = 0;
    }
    held |= uint64_t{1} << (at & 63);
  }
  write(current, held);
}

void pack_low(const int32_t* places, int64_t count, int low_bits, uint8_t* low) {
  const uint32_t mask = (uint32_t{1} << low_bits) - 1;
  uint64_t held = 0;
  int fill = 0;
  for (int64_t i = 0; i < count; ++i) {
    held |= uint64_t{static_cast<uint32_t>(places[i]) & mask} << fill;
    fill += low_bits;
    if (fill < 32) continue;
    std::memcpy(low, &held, 4);
    low += 4;
    held >>= 32;
    fill -= 32;
  }
  std::memcpy(low, &held, static_cast<size_t>(ceil_div(fill, 8)));
}

}  // namespace

// Returns -1, or the position of the first place that descends or is not below num_places.
GW_EXPORT int64_t gw_elias_encode(const int32_t* places, int64_t count, int64_t num_places,
                                  int low_bits, uint8_t* low, uint8_t* high, int64_t num_high) {
  const int64_t bad = find_disorder(places, count, num_places);
  if (bad >= 0 || count == 0) return bad;
  pack_low(places, count, low_bits, low);
  set_high(places, count, low_bits, high, num_high);
  return -1;
}

// Fills `places` with `count` of them. Returns how many high bits are set, kStray or kNoMemory, and
// writes only if they are `count`; `bad` becomes the position of the first place that descends or is
// not below num_places, or -1.
GW_EXPORT int64_t gw_elias_decode(const uint8_t* low, const uint8_t* high, int64_t num_high,
                                  int64_t count, int64_t num_places, int low_bits, int32_t* places,
                                  int64_t* bad, int threads) try {
  thread_local std::vector<int64_t> kept;
  const Bits bits{high, num_high};
  const Packed packed{low, ceil_div(count * low_bits, 8), low_bits};
  int64_t* const first = kept_room(kept, bits.num_blocks());
  const int64_t found = count_blocks(bits, threads, first);
  *bad = -1;
  if (found != count || count == 0) return found;
  for_each_block(bits.num_blocks(), threads, [&](int64_t block) {
    int64_t at = first[block];
    for_each_run(bits, block, [&](const uint32_t* run, int64_t size) {
      for (int64_t i = 0; i < size; ++i) {
        places[at + i] = static_cast<int32_t>((run[i] - static_cast<uint32_t>(at + i)) << low_bits);
      }
      if (low_bits) packed.add_to(places + at, at, size);
      at += size;
    });
  });
  *bad = find_disorder(places, count, num_places);
  return found;
} catch (const std::bad_alloc&) {
  return kNoMemory;
}
