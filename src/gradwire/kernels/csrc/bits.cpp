// Bitmaps of places. Definition: kernels/sparse/bits.py.
#include <new>

#include "bits.h"

namespace {

using namespace gw;

// Counts of the calling thread's last bitmap, as where blocks start.
int64_t* starts_of(const Bits& bits) {
  thread_local std::vector<int64_t> kept;
  return kept_room(kept, bits.num_blocks());
}

}  // namespace

// Bits of strictly ascending places. Returns -1, or the position of the first that does not ascend
// or is not below num_places.
GW_EXPORT int64_t gw_bits_write(const int32_t* places, int64_t count, int64_t num_places,
                                uint8_t* bits) {
  std::memset(bits, 0, static_cast<size_t>(ceil_div(num_places, 8)));
  int64_t last = -1;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t place = places[i];
    if (place <= last || place >= num_places) return i;
    bits[place >> 3] = static_cast<uint8_t>(bits[place >> 3] | (1 << (place & 7)));
    last = place;
  }
  return -1;
}

// The set bits, ascending, to `places`. Returns how many there are, kStray or -2 (no memory); writes
// only if those are `count`.
GW_EXPORT int64_t gw_bits_read(const uint8_t* bytes, int64_t num_places, int64_t count,
                               int32_t* places, int threads) try {
  const Bits bits{bytes, num_places};
  int64_t* const first = starts_of(bits);
  const int64_t found = count_blocks(bits, threads, first);
  if (found != count) return found;
  for_each_block(bits.num_blocks(), threads, [&](int64_t block) {
    int32_t* at = places + first[block];
    for_each_run(bits, block, [&](const uint32_t* run, int64_t size) {
      std::memcpy(at, run, static_cast<size_t>(size) * sizeof(int32_t));
      at += size;
    });
  });
  return found;
} catch (const std::bad_alloc&) {
  return kNoMemory;
}
