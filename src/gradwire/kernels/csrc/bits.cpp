// Bitmaps of places, and lists of places to the dense vector. Definitions: kernels/sparse/bits.py,
// kernels/sparse/scatter.py.
#include <new>

#include "bits.h"
#include "permutation.h"

namespace {

using namespace gw;

constexpr int64_t kAhead = 24;  // writes that are on their way from memory

// Counts of the calling thread's last bitmap, as where blocks start.
int64_t* starts_of(const Bits& bits) {
  thread_local std::vector<int64_t> kept;
  return kept_room(kept, bits.num_blocks());
}

// The dense vector that entries go to; a unit that reaches beyond its end is cut.
struct Target {
  float* out;
  int64_t numel;
  int64_t width;
  int64_t first;  // the part's first place
  const Permutation* permutation;
  float scale;

  // Writes units whose local places are given; places are used up.
  void put(uint32_t* places, int64_t count, const float* values) const {
    for (int64_t i = 0; i < count; ++i) places[i] += static_cast<uint32_t>(first);
    if (permutation) permutation->map<true>(places, count);
    width == 1 ? put_elements(places, count, values) : put_units(places, count, values);
  }

 private:
  void put_elements(const uint32_t* indices, int64_t count, const float* values) const {
    for (int64_t i = 0; i < count; ++i) {
      if (i + kAhead < count) __builtin_prefetch(out + indices[i + kAhead], 1);
      out[indices[i]] = scale * values[i];
    }
  }
  void put_units(const uint32_t* indices, int64_t count, const float* values) const {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = indices[i] * width, size = min64(width, numel - at);
      for (int64_t j = 0; j < size; ++j) out[at + j] = scale * values[i * width + j];
    }
  }
};

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

// out[index] = scale * value for a list of local places. Returns -1, or the position of the first
// that is none.
GW_EXPORT int64_t gw_scatter(const int32_t* places, const float* values, int64_t count,
                             int64_t num_places, int64_t first_place,
                             const uint32_t* permutation_given, float* out, int64_t numel,
                             int64_t width, float scale, int threads) {
  const int64_t bad = find_outside(places, count, num_places);
  if (bad >= 0) return bad;
  static const uint32_t nothing[3 + 3 * kRounds] = {};
  const Permutation permutation(permutation_given ? permutation_given : nothing);
  const Target target{out, numel, width, first_place, permutation_given ? &permutation : nullptr,
                      scale};
  for_each_block(ceil_div(count, kRun), threads, [&](int64_t batch) {
    uint32_t held[kRun];
    const int64_t from = batch * kRun, size = min64(kRun, count - from);
    std::memcpy(held, places + from, static_cast<size_t>(size) * sizeof(uint32_t));
    target.put(held, size, values + from * width);
  });
  return -1;
}
