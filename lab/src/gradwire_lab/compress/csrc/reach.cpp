// What reaches a threshold by |c|, or the largest of it. Definition: the torch reference in
// _reaching.py.
#include "choose.h"

namespace {

// Between the pass that finds and the one that lists, on one thread.
struct Chosen {
  Cut cut;
  int64_t count;
};

Chosen& chosen() {
  thread_local Chosen found = {};
  return found;
}

// Leaves what reaches the threshold in scratch().parts, and the cut that takes it, or the `most`
// largest of it; returns how many that takes. The pool grows to what it has to hold.
int64_t reach(const float* g, float* r, int64_t n, uint32_t threshold, int64_t most, int threads) {
  Scratch& s = scratch();
  const float* const c = r ? r : g;
  int64_t capacity = n / 16 + 1024;
  int64_t num_passed = filter({g, r, n, threads}, threshold, capacity, s.pool, s.parts);
  if (capacity < num_passed && num_passed <= most) {
    capacity = num_passed;
    filter({c, nullptr, n, threads}, threshold, capacity, s.pool, s.parts);
  }
  if (num_passed <= most) {
    chosen().cut = {threshold - 1, 0};
  } else if (num_passed <= capacity) {
    chosen().cut = find_cut(s.pool.values.data(), num_passed, most, s.kept);
  } else {
    chosen().cut = choose(c, nullptr, n, most, threads);
  }
  chosen().count = min64(num_passed, most);
  return chosen().count;
}

}  // namespace

// Finds what reaches the threshold, or the `most` largest of it; returns how many, or -1 when there
// was no memory. gw_list then lists them, on the same thread. Without grad the residual is c.
GW_EXPORT int64_t gw_reach(const float* grad, float* residual, int64_t n, float threshold,
                           int64_t most, int threads) {
  try {
    const uint32_t key = key_of(threshold);
    const uint32_t least = key < 1 ? 1 : key < kInfKey ? key : kInfKey;
    const int team = useful_threads(threads, n);
    return grad ? reach(grad, residual, n, least, most, team)
                : reach(residual, nullptr, n, least, most, team);
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

GW_EXPORT int gw_list(float* residual, int32_t* indices, float* values, int threads) {
  try {
    const int64_t most_read = static_cast<int64_t>(scratch().parts.size()) * kBlock;
    const int team = useful_threads(threads, most_read);
    emit(chosen().cut, chosen().count, residual, indices, values, team);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
