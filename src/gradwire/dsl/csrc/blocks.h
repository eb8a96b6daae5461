// The work of a call: tensors, their blocks, and groups of 64 elements within a block.
#pragma once

#include <cstdint>
#include <cstring>

#define GW_EXPORT extern "C" __attribute__((visibility("default")))
#define GW_INLINE __attribute__((always_inline))

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire layouts are little-endian");

namespace gw {

constexpr int kLanes = 64;                // elements of a group, partial results of a reduction
constexpr int64_t kRun = 16384;           // elements that a thread takes at least at a time
constexpr int64_t kWorth = 1 << 18;       // elements for which waking a thread pays
constexpr int64_t kPrefetchBytes = 4096;  // the hardware's own prefetch stops at every page

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

// One tensor of a call: its length, the numbers that it draws, how many elements a kernel that
// keeps some has kept, and the kernel's buffers in order. (build.py packs these.)
template <int kOperands>
struct Tensor {
  int64_t num_elements;
  uint64_t key;
  uint64_t step;
  int64_t num_kept;
  void* operand[kOperands];
};

// What threads take: runs of whole blocks of one tensor. Asking for one costs more than computing
// a short block, so a run has several of those.
inline int64_t run_of(int64_t block) { return ceil_div(kRun, block) * block; }

// The runs of all tensors of a call, numbered one behind the other.
template <class Tensor>
struct Runs {
  int64_t length;  // elements
  Tensor* tensors;
  int num_tensors;

  int64_t of(int tensor) const { return ceil_div(tensors[tensor].num_elements, length); }

  int64_t count() const {
    int64_t sum = 0;
    for (int i = 0; i < num_tensors; ++i) sum += of(i);
    return sum;
  }

  // As many threads as have enough to do that waking them pays.
  int useful(int threads) const {
    int64_t sum = 0;
    for (int i = 0; i < num_tensors; ++i) sum += tensors[i].num_elements;
    const int64_t most = min64(threads, min64(sum / kWorth, count()));
    return most > 1 ? static_cast<int>(most) : 1;
  }

  // Runs that a thread takes at a time: neighbours where there are many, as prefetching expects.
  int64_t at_once(int threads) const { return min64(16, 1 + count() / (8 * threads)); }
};

// Where a thread has come to among the runs. It mostly asks for higher numbers than before, so that
// finding them costs one walk over the tensors.
template <class Tensor>
struct Cursor {
  const Runs<Tensor>& runs;
  int tensor = 0;
  int64_t first = 0;  // the number of the tensor's first run

  void seek(int64_t number) {
    if (number < first) tensor = 0, first = 0;
    for (int64_t own; number >= first + (own = runs.of(tensor)); ++tensor) first += own;
  }

  // Calls work(tensor, block, its first element, its length) for each block of a run.
  template <class Work>
  inline GW_INLINE void for_each_block_of(int64_t number, int64_t block, const Work& work) {
    seek(number);
    Tensor& found = runs.tensors[tensor];
    const int64_t start = (number - first) * runs.length;
    const int64_t end = min64(start + runs.length, found.num_elements);
    for (int64_t at = start; at < end; at += block) {
      work(found, at / block, at, min64(block, end - at));
    }
  }
};

// Calls work(tensor, block, its first element, its length) for every block of every tensor, in any
// order: one parallel loop.
template <class Tensor, class Work>
void for_each_block(int64_t block, Tensor* tensors, int num_tensors, int threads,
                    const Work& work) {
  const Runs<Tensor> runs{run_of(block), tensors, num_tensors};
  threads = runs.useful(threads);
  const int64_t num_runs = runs.count(), at_once = runs.at_once(threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Cursor<Tensor> at{runs};
#pragma omp for schedule(dynamic, at_once)
    for (int64_t number = 0; number < num_runs; ++number) at.for_each_block_of(number, block, work);
  }
}

// Calls work(first element, number of elements) for each group; only the last may be short. The
// full ones see a constant, from which the compiler makes straight-line vector code.
template <class Work>
inline void for_each_group(int64_t num_elements, const Work& work) {
  int64_t at = 0;
  for (; at + kLanes <= num_elements; at += kLanes) work(at, kLanes);
  if (at < num_elements) work(at, static_cast<int>(num_elements - at));
}

// Fetches ahead of a linear read; an address past the end of a vector does no harm. Inlined by
// force: as a function it has no effect that the compiler knows of, and calls of it are dropped.
inline GW_INLINE void prefetch_group(const float* at) {
  for (int line = 0; line < kLanes; line += 16) {
    __builtin_prefetch(reinterpret_cast<const char*>(at + line) + kPrefetchBytes, 0, 2);
  }
}

}  // namespace gw
