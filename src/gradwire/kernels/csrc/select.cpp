// Selection of the k largest by |c|. Definition: the torch reference in select.py.
#include "choose.h"

namespace {

// Selects from each vector of `order`, which are shared out among threads, the longest first; only
// those longer than a thread's equal share have all threads, in turn.
template <class Length, class Select>
void share_out(std::vector<int64_t>& order, const Length& length, int threads,
               const Select& select) {
  int64_t total = 0;
  for (const int64_t i : order) total += length(i);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return length(a) != length(b) ? length(a) > length(b) : a < b;
  });
  const int team = useful_threads(threads, total);
  size_t num_long = 0;
  while (num_long < order.size() && team > 1 && length(order[num_long]) * team > total) {
    select(order[num_long++], team);
  }
  for_each_block(static_cast<int64_t>(order.size() - num_long), team, [&](int64_t o) {
    select(order[num_long + static_cast<size_t>(o)], 1);
  });
}

// One vector to select from, as the operands of gw_topk.
struct Task {
  const float* grad;
  float* residual;
  int64_t n;
  int64_t k;
  int32_t* indices;
  float* values;
};

}  // namespace

// Returns 0, or 1 when there was no memory for the buffers.
GW_EXPORT int gw_topk(const float* grad, float* residual, int64_t n, int64_t k, int32_t* indices,
                      float* values, int threads) {
  try {
    const int team = useful_threads(threads, n);
    const Cut cut = choose(grad, residual, n, k, team);
    emit(cut, k, residual, indices, values, team);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// Top-k of each of several vectors, as gw_topk.
GW_EXPORT int gw_topk_many(const Task* tasks, int64_t num_tasks, int threads) {
  std::atomic<int> failed{0};
  try {
    std::vector<int64_t> order;
    for (int64_t i = 0; i < num_tasks; ++i) {
      if (tasks[i].n > 0) order.push_back(i);
    }
    share_out(
        order, [&](int64_t i) { return tasks[i].n; }, threads,
        [&](int64_t i, int team) {
          const Task& t = tasks[i];
          failed |= gw_topk(t.grad, t.residual, t.n, t.k, t.indices, t.values, team);
        });
    return failed;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// Top-k of each range of c, one behind the other in the output; a range's indices count from its
// entry in `firsts`. Returns 2, with nothing done, where ranges do not lie in c, are shorter than
// their k or select another number than there is room for.
GW_EXPORT int gw_topk_ranges(const float* c, int64_t n, const int64_t* starts, const int64_t* stops,
                             const int64_t* ks, const int64_t* firsts, int64_t num_ranges,
                             int32_t* indices, float* values, int64_t room, int threads) {
  std::atomic<int> failed{0};
  const auto length = [&](int64_t i) { return stops[i] - starts[i]; };
  try {
    std::vector<int64_t> order, places;
    int64_t num_out = 0;
    for (int64_t i = 0; i < num_ranges; ++i) {
      const bool fits = starts[i] >= 0 && stops[i] <= n && ks[i] >= 0 && ks[i] <= length(i);
      if (!fits) return 2;
      places.push_back(num_out);
      num_out += ks[i];
      if (ks[i] > 0) order.push_back(i);
    }
    if (num_out != room) return 2;
    share_out(order, length, threads, [&](int64_t i, int team) {
      const int64_t place = places[static_cast<size_t>(i)];
      failed |= gw_topk(c + starts[i], nullptr, length(i), ks[i], indices + place, values + place,
                        team);
      for (int64_t o = place; o < place + ks[i]; ++o) indices[o] += static_cast<int32_t>(firsts[i]);
    });
    return failed;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
