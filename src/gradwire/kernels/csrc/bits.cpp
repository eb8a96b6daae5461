// Bitmaps of places, sums kept under them, and the way back to the dense vector. Definitions:
// sparse/formats/_bits.py, sparse/merge.py, sparse/scatter.py.
#include <new>

#include "bits.h"
#include "permutation.h"

namespace {

using namespace gw;

constexpr int64_t kAhead = 24;           // writes that are on their way from memory
constexpr int64_t kLeastShared = 65536;  // entries that are worth waking a thread for

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

struct Sums {
  uint64_t* touched;
  float* sums;
  int64_t width;
};

// Adds the entries whose places are in [low, high); a unit's width is known to the compiler where it
// is `kWidth`.
template <int64_t kWidth>
void add_range(const Sums& to, uint32_t low, uint32_t high, const int32_t* places,
               const float* values, int64_t count) {
  const int64_t width = kWidth ? kWidth : to.width;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) __builtin_prefetch(to.sums + places[i + kAhead] * width, 1);
    const uint32_t place = static_cast<uint32_t>(places[i]);
    if (place - low >= high - low) continue;
    const uint64_t bit = uint64_t{1} << (place % 64), before = to.touched[place / 64];
    to.touched[place / 64] = before | bit;
    float* const sum = to.sums + place * width;
    const float* const value = values + i * width;
    for (int64_t j = 0; j < width; ++j) sum[j] = (before & bit ? sum[j] : 0.0f) + value[j];
  }
}

void gather(const float* sums, int64_t width, const uint32_t* places, int64_t count,
            float* values) {
  if (width == 1) {
    for (int64_t i = 0; i < count; ++i) values[i] = sums[places[i]];
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(values + i * width, sums + places[i] * width,
                static_cast<size_t>(width) * sizeof(float));
  }
}

}  // namespace

GW_EXPORT int64_t gw_bits_count(const uint8_t* bits, int64_t num_places, int threads) try {
  const Bits given{bits, num_places};
  return count_blocks(given, threads, starts_of(given));
} catch (const std::bad_alloc&) {
  return kNoMemory;
}

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

// Units under set bits one behind the other, their places too where `places` is given. Returns how
// many there are.
GW_EXPORT int64_t gw_bits_gather(const uint8_t* bytes, int64_t num_places, const float* sums,
                                 int64_t width, int32_t* places, float* values,
                                 int threads) try {
  const Bits bits{bytes, num_places};
  int64_t* const first = starts_of(bits);
  const int64_t found = count_blocks(bits, threads, first);
  for_each_block(bits.num_blocks(), threads, [&](int64_t block) {
    int64_t at = first[block];
    for_each_run(bits, block, [&](const uint32_t* run, int64_t size) {
      if (places) std::memcpy(places + at, run, static_cast<size_t>(size) * sizeof(int32_t));
      gather(sums, width, run, size, values + at * width);
      at += size;
    });
  });
  return found;
} catch (const std::bad_alloc&) {
  return kNoMemory;
}

// sums[place] += value under a set bit, = 0 + value elsewhere, and the bit is set. Each thread has
// its own range of places and reads the whole list, so a place's sum follows the list's order.
// Returns -1, or the position of the first place that is none.
GW_EXPORT int64_t gw_bits_add(uint64_t* touched, float* sums, int64_t num_places, int64_t width,
                              const int32_t* places, const float* values, int64_t count,
                              int threads) {
  const int64_t bad = find_outside(places, count, num_places);
  if (bad >= 0) return bad;
  const int64_t num_words = ceil_div(num_places, 64);
  const int64_t num_ranges = count < kLeastShared || threads < 1 ? 1 : threads;
  const auto add = width == 1 ? add_range<1> : add_range<0>;
  for_each_block(num_ranges, threads, [&](int64_t range) {
    const uint32_t low = static_cast<uint32_t>(range * num_words / num_ranges * 64);
    const uint32_t high = static_cast<uint32_t>((range + 1) * num_words / num_ranges * 64);
    add({touched, sums, width}, low, high, places, values, count);
  });
  return -1;
}

// out[index] = scale * value for every set bit. Returns as gw_bits_read, and writes only if so.
GW_EXPORT int64_t gw_bits_scatter(const uint8_t* bytes, int64_t num_places, const float* values,
                                  int64_t count, int64_t first_place,
                                  const uint32_t* permutation_given, float* out, int64_t numel,
                                  int64_t width, float scale, int threads) try {
  const Bits bits{bytes, num_places};
  int64_t* const first = starts_of(bits);
  const int64_t found = count_blocks(bits, threads, first);
  if (found != count || num_places == 0) return found;
  static const uint32_t nothing[3 + 3 * kRounds] = {};
  const Permutation permutation(permutation_given ? permutation_given : nothing);
  const Target target{out, numel, width, first_place, permutation_given ? &permutation : nullptr,
                      scale};
  for_each_block(bits.num_blocks(), threads, [&](int64_t block) {
    int64_t at = first[block];
    for_each_run(bits, block, [&](uint32_t* run, int64_t size) {
      target.put(run, size, values + at * width);
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
