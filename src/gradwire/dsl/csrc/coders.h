// A field's blocks coded to fewer bytes and back, in parallel. (coders.py calls these.)
//
// A coder is two functions:
//   int64_t encode(uint8_t* bytes, int64_t n)    codes n bytes in place; their number, at most n
//   bool decode(const uint8_t* in, int64_t length, uint8_t* out, int64_t n)
//                                                false if these do not decode to n bytes; writes
//                                                nothing outside of them, whatever it is given
#pragma once

#include "blocks.h"

namespace gw {

// The bytes of a field, cut into blocks, and where the blocks begin once they are coded.
struct Field {
  uint8_t* plain;
  int64_t num_bytes;
  int64_t block_bytes;
  int32_t* lengths;
  int64_t* starts;  // room for one more than there are blocks
  uint8_t* coded;

  int64_t num_blocks() const { return ceil_div(num_bytes, block_bytes); }
  uint8_t* block(int64_t i) const { return plain + i * block_bytes; }
  int64_t size(int64_t i) const { return min64(block_bytes, num_bytes - i * block_bytes); }

  // Prefix sums of the lengths; returns the first block whose length no block has, or -1.
  int64_t place() const {
    starts[0] = 0;
    for (int64_t i = 0; i < num_blocks(); ++i) {
      if (lengths[i] < 0 || lengths[i] > size(i)) return i;
      starts[i + 1] = starts[i] + lengths[i];
    }
    return -1;
  }

  template <class Work>
  void for_each_block(int threads, const Work& work) const {
    const int64_t run = ceil_div(kRun, block_bytes), count = num_blocks();
    threads = static_cast<int>(min64(threads, ceil_div(count, run)));
#pragma omp parallel for schedule(dynamic, run) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < count; ++i) work(i);
  }
};

// Fills lengths and coded, destroys plain; returns the number of bytes of coded, or -1 if the coder
// gave a length that its block cannot have.
template <class Encode>
int64_t encode_field(const Field& field, int threads, const Encode& encode) {
  field.for_each_block(threads, [&](int64_t i) {
    field.lengths[i] = static_cast<int32_t>(encode(field.block(i), field.size(i)));
  });
  if (field.place() >= 0) return -1;
  field.for_each_block(threads, [&](int64_t i) {
    std::memcpy(field.coded + field.starts[i], field.block(i),
                static_cast<size_t>(field.lengths[i]));
  });
  return field.starts[field.num_blocks()];
}

// Fills plain from lengths and num_coded bytes; returns a block that these do not give, or -1.
template <class Decode>
int64_t decode_field(const Field& field, int64_t num_coded, int threads, const Decode& decode) {
  int64_t wrong = field.place();
  if (wrong >= 0) return wrong;
  if (field.starts[field.num_blocks()] != num_coded) return 0;
  field.for_each_block(threads, [&](int64_t i) {
    if (!decode(field.coded + field.starts[i], field.lengths[i], field.block(i), field.size(i))) {
#pragma omp atomic write
      wrong = i;
    }
  });
  return wrong;
}

}  // namespace gw
