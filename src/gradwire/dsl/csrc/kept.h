// Kept elements: one pass over the gradient, though how many there are is known only behind it.
//
// A run of blocks writes what it keeps where its first element would lie if all were kept. When all
// runs are done they are moved together, in the order of the gradient. Few pages are touched where
// few elements are kept, and no memory but the buffers' own is needed.
#pragma once

#include "packing.h"

namespace gw {

// A buffer of kept elements: its place among the kernel's operands, the bytes of an element.
struct KeptBuffer {
  int operand;
  int element_bytes;
};

// What one run keeps: an array for each buffer, all of them `count` long.
template <int kBuffers>
struct Kept {
  char* array[kBuffers];
  int64_t count;

  template <class T>
  T* at(int buffer) { return reinterpret_cast<T*>(array[buffer]); }
};

template <int kBuffers, class Tensor>
inline Kept<kBuffers> kept_from(const Tensor& tensor, const KeptBuffer (&buffers)[kBuffers],
                                int64_t first) {
  Kept<kBuffers> kept = {};
  for (int i = 0; i < kBuffers; ++i) {
    kept.array[i] =
        static_cast<char*>(tensor.operand[buffers[i].operand]) + first * buffers[i].element_bytes;
  }
  return kept;
}

// As for_each_block; work gets the arrays of its run too, which have room for all of its elements.
// A tensor's num_kept is -1 where there was no memory for the counts.
template <int kBuffers, class Tensor, class Work>
void keep_each_block(int64_t length, Tensor* tensors, int num_tensors, int threads,
                     const KeptBuffer (&buffers)[kBuffers], const Work& work) {
  const Runs<Tensor> runs{run_of(length), tensors, num_tensors};
  threads = runs.useful(threads);
  const int64_t num_runs = runs.count(), at_once = runs.at_once(threads);
  int64_t* const counts =
      static_cast<int64_t*>(__builtin_malloc(static_cast<size_t>(num_runs) * sizeof(int64_t)));
  for (int i = 0; i < num_tensors; ++i) tensors[i].num_kept = counts == nullptr ? -1 : 0;
  if (counts == nullptr) return;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Cursor<Tensor> at{runs};
#pragma omp for schedule(dynamic, at_once)
    for (int64_t number = 0; number < num_runs; ++number) {
      at.seek(number);
      Kept<kBuffers> own =
          kept_from(tensors[at.tensor], buffers, (number - at.first) * runs.length);
      at.for_each_block_of(number, length, [&](Tensor& tensor, int64_t block, int64_t start,
                                               int64_t n) GW_INLINE {
        work(tensor, own, block, start, n);
      });
      counts[number] = own.count;
    }
  }
  Cursor<Tensor> at{runs};
  for (int64_t number = 0; number < num_runs; ++number) {  // to lower addresses
    at.seek(number);
    Tensor& tensor = tensors[at.tensor];
    const auto to = kept_from(tensor, buffers, tensor.num_kept);
    const auto from = kept_from(tensor, buffers, (number - at.first) * runs.length);
    for (int i = 0; i < kBuffers; ++i) {
      std::memmove(to.array[i], from.array[i],
                   static_cast<size_t>(counts[number] * buffers[i].element_bytes));
    }
    tensor.num_kept += counts[number];
  }
  __builtin_free(counts);
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

// Writes a group's kept elements one behind the other; of a whole group, what is behind those, up
// to its length, may be overwritten.
template <class T>
inline GW_INLINE void append(T* to, const T (&from)[kLanes], uint64_t mask, int count) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) if (count == kLanes) {
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
