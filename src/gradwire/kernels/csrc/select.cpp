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
