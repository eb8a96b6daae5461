// Selection of the k largest by |c|. Definition: the torch reference in select.py.
#include "choose.h"

namespace {

// One vector to select from, as the operands of gw_topk; its indices count from `first`.
struct Task {
  const float* grad;
  float* residual;
  int64_t n;
  int64_t k;
  int32_t* indices;
  float* values;
  int64_t first;
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

// Top-k of each of several vectors, as gw_topk. They are shared out among threads, the longest
// first; only those longer than a thread's equal share have all threads, in turn.
GW_EXPORT int gw_topk_many(const Task* tasks, int64_t num_tasks, int threads) {
  std::atomic<int> failed{0};
  try {
    std::vector<Task> order;
    int64_t total = 0;
    for (int64_t i = 0; i < num_tasks; ++i) {
      if (tasks[i].n > 0) order.push_back(tasks[i]);
      total += tasks[i].n;
    }
    std::stable_sort(order.begin(), order.end(),
                     [](const Task& a, const Task& b) { return a.n > b.n; });
    const auto select = [&](const Task& t, int team) {
      failed |= gw_topk(t.grad, t.residual, t.n, t.k, t.indices, t.values, team);
      for (int64_t i = 0; t.first && i < t.k; ++i) t.indices[i] += static_cast<int32_t>(t.first);
    };
    const int team = useful_threads(threads, total);
    size_t num_long = 0;
    while (num_long < order.size() && team > 1 && order[num_long].n * team > total) {
      select(order[num_long++], team);
    }
    for_each_block(static_cast<int64_t>(order.size() - num_long), team, [&](int64_t i) {
      select(order[num_long + static_cast<size_t>(i)], 1);
    });
    return failed;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// gw_topk_many of ranges of c, one behind the other in the output; a range's indices count from its
// entry in `firsts`. Returns 2, with nothing done, where ranges do not lie in c, are shorter than
// their k or select another number than there is room for.
GW_EXPORT int gw_topk_ranges(const float* c, int64_t n, const int64_t* starts, const int64_t* stops,
                             const int64_t* ks, const int64_t* firsts, int64_t num_ranges,
                             int32_t* indices, float* values, int64_t room, int threads) try {
  std::vector<Task> tasks;
  for (int64_t i = 0; i < num_ranges; ++i) {
    const int64_t size = stops[i] - starts[i], k = ks[i];
    if (starts[i] < 0 || stops[i] > n || k < 0 || k > size || k > room) return 2;
    if (k > 0) tasks.push_back({c + starts[i], nullptr, size, k, indices, values, firsts[i]});
    indices += k;
    values += k;
    room -= k;
  }
  return room ? 2 : gw_topk_many(tasks.data(), static_cast<int64_t>(tasks.size()), threads);
} catch (const std::bad_alloc&) {
  return 1;
}
