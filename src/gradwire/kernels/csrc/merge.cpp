// merge: ascending entries of several ranks added up by place. Definition: kernels/sparse/merge.py.
//
// All lists advance together, window by window of places, so that the sums of a window stay in the
// core's own memory, and none has to be kept for a place that nobody took.
#include <algorithm>
#include <new>

#include "bits.h"

namespace {

using namespace gw;

constexpr int64_t kWindowElements = 16384;  // 64 KiB of sums
constexpr int64_t kLeastShared = 65536;     // entries that are worth waking a thread for

struct List {
  const int32_t* places;
  const float* values;
  int64_t count;

  int64_t first_from(int64_t place) const {
    return std::lower_bound(places, places + count, place) - places;
  }
};

// Sums of adjacent places, and a bit for each that says whether it was touched.
struct Window {
  std::vector<float> sums;
  std::vector<uint64_t> touched;
};

struct Sums {
  int32_t* places;
  float* values;
  int64_t count;
};

// A unit's width is known to the compiler where it is `kWidth`.
template <int64_t kWidth>
class Merger {
 public:
  Merger(const std::vector<List>& lists, int64_t width, float scale, Window& held)
      : lists_(lists), width_(width), scale_(scale), held_(held) {
    places_ = std::max<int64_t>(1, kWindowElements / width / 64) * 64;
    held_.sums.resize(static_cast<size_t>(places_ * width));
    held_.touched.assign(static_cast<size_t>(places_ / 64), 0);
  }

  // Places in [low, high), to `out` from its first on.
  void run(int64_t low, int64_t high, Sums& out) {
    at_.clear();
    for (const List& list : lists_) at_.push_back(list.first_from(low));
    for (int64_t first = next(high); first < high; first = next(high)) {
      const int64_t start = first / places_ * places_;
      const int64_t stop = min64(start + places_, high);
      for (size_t i = 0; i < lists_.size(); ++i) add(lists_[i], at_[i], start, stop);
      emit(start, out);
    }
  }

 private:
  int64_t width() const { return kWidth ? kWidth : width_; }

  // The least place that is left, so that windows without entries cost nothing.
  int64_t next(int64_t high) const {
    int64_t least = high;
    for (size_t i = 0; i < lists_.size(); ++i) {
      if (at_[i] < lists_[i].count) least = min64(least, lists_[i].places[at_[i]]);
    }
    return least;
  }
  void add(const List& list, int64_t& at, int64_t start, int64_t stop) {
    float* const sums = held_.sums.data();
    uint64_t* const touched = held_.touched.data();
    for (; at < list.count && list.places[at] < stop; ++at) {
      const int64_t place = list.places[at] - start;
      const uint64_t bit = uint64_t{1} << (place % 64), before = touched[place / 64];
      touched[place / 64] = before | bit;
      float* const sum = sums + place * width();
      const float* const value = list.values + at * width();
      for (int64_t j = 0; j < width(); ++j) {
        sum[j] = (before & bit ? sum[j] : 0.0f) + scale_ * value[j];
      }
    }
  }
  void emit(int64_t start, Sums& out) {
    for (size_t i = 0; i < held_.touched.size(); ++i) {
      for (uint64_t word = held_.touched[i]; word; word &= word - 1) {
        const int64_t place = static_cast<int64_t>(i) * 64 + __builtin_ctzll(word);
        out.places[out.count] = static_cast<int32_t>(start + place);
        std::memcpy(out.values + out.count * width(), held_.sums.data() + place * width(),
                    static_cast<size_t>(width()) * sizeof(float));
        ++out.count;
      }
      held_.touched[i] = 0;
    }
  }

  const std::vector<List>& lists_;
  int64_t width_;
  float scale_;
  Window& held_;
  int64_t places_;
  std::vector<int64_t> at_;
};

// Tasks have ranges of places; each writes where its first sum lies if no place is met twice.
void merge_range(const std::vector<List>& lists, int64_t width, float scale, int64_t low,
                 int64_t high, Sums& out) {
  thread_local Window held;
  if (width == 1) {
    Merger<1>(lists, width, scale, held).run(low, high, out);
  } else {
    Merger<0>(lists, width, scale, held).run(low, high, out);
  }
}

int64_t merge_all(const std::vector<List>& lists, int64_t num_places, int64_t width, float scale,
                  int32_t* places, float* values, int threads) {
  int64_t total = 0;
  for (const List& list : lists) total += list.count;
  const int64_t num_tasks = total < kLeastShared || threads < 1 ? 1 : threads;
  std::vector<Sums> sums(static_cast<size_t>(num_tasks));
  for_each_block(num_tasks, threads, [&](int64_t task) {
    const int64_t low = task * num_places / num_tasks, high = (task + 1) * num_places / num_tasks;
    int64_t before = 0;
    for (const List& list : lists) before += list.first_from(low);
    Sums own{places + before, values + before * width, 0};
    merge_range(lists, width, scale, low, high, own);
    sums[static_cast<size_t>(task)] = own;
  });
  int64_t count = 0;
  for (const Sums& own : sums) {  // to lower addresses
    const size_t size = static_cast<size_t>(own.count);
    std::memmove(places + count, own.places, size * sizeof(int32_t));
    std::memmove(values + count * width, own.values,
                 size * static_cast<size_t>(width) * sizeof(float));
    count += own.count;
  }
  return count;
}

}  // namespace

// Writes sums by ascending place; there is room for the entries of all lists. Returns how many there
// are, kNoMemory, or -3 - i where list i descends or has a place that is none; nothing is written
// then.
GW_EXPORT int64_t gw_merge(const int32_t* const* places, const float* const* values,
                           const int64_t* counts, int64_t num_lists, int64_t num_places,
                           int64_t width, float scale, int32_t* out_places, float* out_values,
                           int threads) try {
  std::vector<List> lists;
  for (int64_t i = 0; i < num_lists; ++i) {
    lists.push_back({places[i], values[i], counts[i]});
    if (find_disorder(places[i], counts[i], num_places) >= 0) return -3 - i;
  }
  return merge_all(lists, num_places, width, scale, out_places, out_values, threads);
} catch (const std::bad_alloc&) {
  return kNoMemory;
}
