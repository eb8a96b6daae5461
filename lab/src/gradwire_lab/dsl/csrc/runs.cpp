// Bytes by runs: up to `most` adjacent bytes `of` are a run, every other byte is one by itself.
// (coders.py makes the tables: the code of each, and the byte and the times of each code.)
//
// A field is cut into blocks, which are coded and decoded in parallel, each by itself.
#include "blocks.h"

namespace {

using namespace gw;

constexpr int64_t kRun = 16384;  // bytes that a thread takes at least at a time

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
  void for_each(int threads, const Work& work) const {
    const int64_t run = ceil_div(kRun, block_bytes), count = num_blocks();
    for_each_block(ceil_div(count, run), threads, [&](int64_t task) {
      for (int64_t i = task * run; i < min64(count, (task + 1) * run); ++i) work(i);
    });
  }
};

// The codes of single bytes and of runs, by length.
struct Codes {
  int of;
  int64_t most;
  uint8_t single[256];
  uint8_t run[257];

  Codes(int of, int most, const int64_t* singles, const int64_t* runs) : of(of), most(most) {
    for (int i = 0; i < 256; ++i) single[i] = static_cast<uint8_t>(singles[i]);
    for (int i = 0; i <= most; ++i) run[i] = static_cast<uint8_t>(runs[i]);
  }
};

// Writes the codes of a number of bytes `of`; of none a byte that is still to be overwritten.
inline uint8_t* put_runs(uint8_t* out, int64_t count, int64_t most, const uint8_t* run) {
  for (; count >= most; count -= most) *out++ = run[most];
  *out = run[count];
  return out + (count > 0);
}

// In place: what is written never passes what was read. Eight bytes at a time are looked through
// for those that are not `of`, which takes no branch a byte.
int64_t encode_block(uint8_t* bytes, int64_t n, const Codes& codes) {
  constexpr uint64_t kLow7 = 0x7F7F7F7F7F7F7F7Fu;
  const int of = codes.of;  // no byte that is written changes it
  const int64_t most = codes.most;
  const uint64_t all = static_cast<uint64_t>(of) * 0x0101010101010101u;
  uint8_t* out = bytes;
  int64_t next = 0;  // behind the last byte that is not `of`
  for (int64_t at = 0; at < n; at += 8) {
    uint64_t word = all;
    std::memcpy(&word, bytes + at, static_cast<size_t>(min64(8, n - at)));
    word ^= all;
    uint64_t high = (((word & kLow7) + kLow7) | word) & ~kLow7;  // the top bit of each
    for (; high; high &= high - 1) {
      const int place = __builtin_ctzll(high) / 8;
      out = put_runs(out, at + place - next, most, codes.run);
      *out++ = codes.single[static_cast<uint8_t>(word >> (8 * place)) ^ of];
      next = at + place + 1;
    }
  }
  if (next < n) out = put_runs(out, n - next, most, codes.run);
  return out - bytes;
}

// False if these are no code of n bytes; writes nothing outside of them, whatever it is given.
bool decode_block(const uint8_t* in, int64_t length, uint8_t* out, int64_t n, int of,
                  const int64_t* byte, const int64_t* times) {
  std::memset(out, of, static_cast<size_t>(n));
  int64_t at = 0;
  for (int64_t i = 0; i < length; ++i) {
    if (at >= n) return false;
    out[at] = static_cast<uint8_t>(byte[in[i]]);
    at += times[in[i]];
  }
  return at == n;
}

}  // namespace

// Fills lengths and coded, destroys plain; returns the number of bytes of coded.
GW_EXPORT int64_t encode_runs(uint8_t* plain, int64_t num_bytes, int64_t block_bytes,
                              int32_t* lengths, int64_t* starts, uint8_t* coded, int of, int most,
                              const int64_t* single, const int64_t* run, int threads) {
  const Field field{plain, num_bytes, block_bytes, lengths, starts, coded};
  const Codes codes(of, most, single, run);
  field.for_each(threads, [&](int64_t i) {
    lengths[i] = static_cast<int32_t>(encode_block(field.block(i), field.size(i), codes));
  });
  field.place();
  field.for_each(threads, [&](int64_t i) {
    std::memcpy(coded + starts[i], field.block(i), static_cast<size_t>(lengths[i]));
  });
  return starts[field.num_blocks()];
}

// Fills plain from lengths and num_coded bytes; returns a block that these do not give, or -1.
GW_EXPORT int64_t decode_runs(uint8_t* plain, int64_t num_bytes, int64_t block_bytes,
                              int32_t* lengths, int64_t* starts, uint8_t* coded, int64_t num_coded,
                              int of, const int64_t* byte, const int64_t* times, int threads) {
  const Field field{plain, num_bytes, block_bytes, lengths, starts, coded};
  int64_t wrong = field.place();
  if (wrong >= 0) return wrong;
  if (starts[field.num_blocks()] != num_coded) return 0;
  field.for_each(threads, [&](int64_t i) {
    if (!decode_block(coded + starts[i], lengths[i], field.block(i), field.size(i), of, byte,
                      times)) {
#pragma omp atomic write
      wrong = i;
    }
  });
  return wrong;
}
