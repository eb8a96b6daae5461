// Kept elements: one pass over the gradient, though how many there are is known only behind it.
//
// Each thread appends what it keeps to memory of its own, which the calling thread owns and keeps
// for its next call. When all blocks are done, the runs of blocks are copied from there to where
// they belong: in the order of the gradient, one behind the other.
#pragma once

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "packing.h"

namespace gw {

constexpr int kMostThreads = 64;

struct Memory {
  void* bytes = nullptr;
  int64_t size = 0;

  ~Memory() { __builtin_free(bytes); }
};

// A buffer of kept elements: its place among the kernel's operands, the bytes of an element.
struct KeptBuffer {
  int operand;
  int element_bytes;
};

// What one thread keeps: an array for each buffer, all of them `count` long.
template <int kBuffers>
struct Kept {
  Memory* memory;
  const KeptBuffer* buffers;
  char* array[kBuffers];
  int64_t capacity = 0;
  int64_t count = 0;

  template <class T>
  T* at(int buffer) { return reinterpret_cast<T*>(array[buffer]); }

  // Room for `more` elements behind the `count` that there are; false if there is no memory.
  bool reserve(int64_t more) {
    if (capacity == 0) divide(memory->bytes, memory->size / element_bytes() / kLanes * kLanes);
    if (count + more <= capacity) return true;
    const int64_t wanted = ceil_div(2 * (count + more), kLanes) * kLanes;
    Kept grown = *this;
    void* const bytes = __builtin_malloc(static_cast<size_t>(wanted * element_bytes()));
    if (bytes == nullptr) return false;
    grown.divide(bytes, wanted);
    for (int i = 0; i < kBuffers; ++i) {
      if (count > 0) std::memcpy(grown.array[i], array[i], size_of(i, count));
    }
    __builtin_free(memory->bytes);
    memory->bytes = bytes;
    memory->size = wanted * element_bytes();
    *this = grown;
    return true;
  }

  size_t size_of(int buffer, int64_t elements) const {
    return static_cast<size_t>(elements * buffers[buffer].element_bytes);
  }

 private:
  int64_t element_bytes() const {
    int64_t sum = 0;
    for (int i = 0; i < kBuffers; ++i) sum += buffers[i].element_bytes;
    return sum;
  }

  void divide(void* bytes, int64_t elements) {
    char* next = static_cast<char*>(bytes);
    for (int i = 0; i < kBuffers; ++i) {
      array[i] = next;
      next += elements * buffers[i].element_bytes;
    }
    capacity = elements;
  }
};

// Where the kept elements of one run lie: in which thread's arrays, from where on, how many.
struct Segment {
  int thread;
  int64_t first;
  int64_t count;
  int64_t target;  // their place in the tensor's own buffers
};

// The order of the gradient; the count of each tensor goes into its record.
template <class Tensor>
inline void place_segments(const Runs<Tensor>& runs, Segment* segments) {
  for (int i = 0, number = 0; i < runs.num_tensors; ++i) {
    int64_t kept = 0;
    for (const int64_t end = number + runs.of(i); number < end; ++number) {
      segments[number].target = kept;
      kept += segments[number].count;
    }
    runs.tensors[i].num_kept = kept;
  }
}

// As for_each_block; work gets the thread's arrays too, with room for the whole block. A tensor's
// num_kept is -1 where there was no memory.
template <int kBuffers, class Tensor, class Work>
void keep_each_block(int64_t length, Tensor* tensors, int num_tensors, int threads,
                     const KeptBuffer (&buffers)[kBuffers], const Work& work) {
  static thread_local Memory memories[kMostThreads];
  Memory* const memory = memories;  // the calling thread's, for all threads of its team
  const Runs<Tensor> runs{run_of(length), tensors, num_tensors};
  threads = static_cast<int>(min64(runs.useful(threads), kMostThreads));
  const int64_t num_runs = runs.count(), at_once = runs.at_once(threads);
  Segment* const segments =
      static_cast<Segment*>(__builtin_malloc(static_cast<size_t>(num_runs) * sizeof(Segment)));
  Kept<kBuffers> kept[kMostThreads];
  bool failed = segments == nullptr;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
  {
#if defined(_OPENMP)
    const int thread = omp_get_thread_num();
#else
    const int thread = 0;
#endif
    Kept<kBuffers>& own = kept[thread];
    own.memory = memory + thread;
    own.buffers = buffers;
    Cursor<Tensor> at{runs};
#pragma omp for schedule(dynamic, at_once)
    for (int64_t number = 0; number < num_runs; ++number) {
      if (failed || segments == nullptr) continue;  // each thread has a `failed` of its own
      const int64_t before = own.count;
      at.for_each_block_of(number, length, [&](Tensor& tensor, int64_t block, int64_t start,
                                               int64_t n) GW_INLINE {
        failed = failed || !own.reserve(n + kLanes);  // append writes behind the last
        if (!failed) work(tensor, own, block, start, n);
      });
      segments[number] = {thread, before, own.count - before, 0};
    }
  }
  if (failed) {
    for (int i = 0; i < num_tensors; ++i) tensors[i].num_kept = -1;
    __builtin_free(segments);
    return;
  }
  place_segments(runs, segments);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Cursor<Tensor> at{runs};
#pragma omp for schedule(static)
    for (int64_t number = 0; number < num_runs; ++number) {
      const Segment& found = segments[number];
      const Kept<kBuffers>& source = kept[found.thread];
      at.seek(number);
      for (int i = 0; i < kBuffers; ++i) {
        char* const to = static_cast<char*>(tensors[at.tensor].operand[buffers[i].operand]);
        std::memcpy(to + source.size_of(i, found.target),
                    source.array[i] + source.size_of(i, found.first),
                    source.size_of(i, found.count));
      }
    }
  }
  __builtin_free(segments);
}

// A bit for each element of a group that is kept.
inline GW_INLINE uint64_t mask_of(const uint8_t (&keep)[kLanes]) {
  uint64_t mask = 0;
  uint8_t bytes[sizeof mask];
  pack<1>(keep, bytes, kLanes);
  std::memcpy(&mask, bytes, sizeof mask);
  return mask;
}

inline int count_of(uint64_t mask) { return __builtin_popcountll(mask); }

#if defined(__AVX512F__)
// Sixteen elements of four bytes, those of the mask in front.
typedef int32_t Sixteen __attribute__((vector_size(64)));

inline GW_INLINE Sixteen compressed(Sixteen x, uint16_t mask) {
  asm("vpcompressd %1, %0 %{%2%} %{z%}" : "=v"(x) : "v"(x), "Yk"(mask));
  return x;
}
#endif

// Writes a group's kept elements one behind the other; what is behind those, up to the length of a
// group, may be overwritten.
template <class T>
inline GW_INLINE void append(T* to, const T (&from)[kLanes], uint64_t mask) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    for (int at = 0; mask; at += 16, mask >>= 16) {
      Sixteen part;
      std::memcpy(&part, from + at, sizeof part);
      part = compressed(part, static_cast<uint16_t>(mask));
      std::memcpy(to, &part, sizeof part);
      to += count_of(mask & 0xFFFF);
    }
    return;
  }
#endif
  for (; mask; mask &= mask - 1) *to++ = from[__builtin_ctzll(mask)];
}

}  // namespace gw
