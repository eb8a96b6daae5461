// The size of a union of ascending lists. Definition: the torch reference in distinct.py.
#include <algorithm>
#include <atomic>

#include "blocks.h"

namespace {

using namespace gw;

constexpr int64_t kPlaces = 1 << 18;  // of a block: a bit each, 32 KiB, stays in the first cache
constexpr int64_t kWords = kPlaces / 64;

struct Lists {
  const int32_t* const* indices;
  const int64_t* lengths;
  int64_t count;
};

struct Seen {
  int64_t distinct = 0;
  int64_t total = 0;
};

// A vectorised pass of its own, so that the bits are set without a check.
bool ascends_within(const int32_t* from, const int32_t* to, int64_t first, int64_t last) {
  int32_t wrong = 0;
  for (const int32_t* at = from; at + 1 < to; ++at) wrong |= at[1] <= at[0];
  return !wrong && (from == to || (from[0] >= first && to[-1] < last));
}

// Each block takes of each list the run from its first place to the next block's. The runs of a
// list that ascends are the whole list; of any other, one does not ascend within its block, or is
// missing in the total.
Seen count_block(const Lists& lists, int64_t first, int64_t last) {
  uint64_t bits[kWords] = {};
  Seen seen;
  for (int64_t l = 0; l < lists.count; ++l) {
    const int32_t* const end = lists.indices[l] + lists.lengths[l];
    const int32_t* const from = std::lower_bound(lists.indices[l], end, first);
    const int32_t* const to = std::lower_bound(from, end, last);
    if (!ascends_within(from, to, first, last)) return {};
    for (const int32_t* at = from; at != to; ++at) {
      const uint32_t place = static_cast<uint32_t>(*at) - static_cast<uint32_t>(first);
      bits[place >> 6] |= uint64_t{1} << (place & 63);
    }
    seen.total += to - from;
  }
  for (const uint64_t word : bits) seen.distinct += __builtin_popcountll(word);
  return seen;
}

}  // namespace

// Returns how many places occur, or -1 where a list does not ascend within [0, n).
GW_EXPORT int64_t gw_count_distinct(const int32_t* const* indices, const int64_t* lengths,
                                    int64_t count, int64_t n, int threads) {
  const Lists lists{indices, lengths, count};
  std::atomic<int64_t> distinct{0}, total{0};
  for_each_block(ceil_div(n, kPlaces), threads, [&](int64_t b) {
    const Seen seen = count_block(lists, b * kPlaces, min64((b + 1) * kPlaces, n));
    distinct.fetch_add(seen.distinct, std::memory_order_relaxed);
    total.fetch_add(seen.total, std::memory_order_relaxed);
  });
  int64_t expected = 0;
  for (int64_t l = 0; l < count; ++l) expected += lengths[l];
  return total.load() == expected ? distinct.load() : -1;
}
