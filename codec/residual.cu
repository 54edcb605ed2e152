// What is left of a chunk that is known from an earlier one, and its inverse: the kinds of storage/FORMAT.md.
//
// digest_pieces.cu comes first. All addresses are multiples of 16. No kernel reads or writes past the sizes that it is
// given, in bytes.

constexpr u32 kUnitsPerThread = 4;   // in flight; a unit is 16 bytes
constexpr u32 kXor = 0, kDifference = 1, kSignedDifference = 2, kOnlyKeep = 3;   // what to do; by `kind`

// Values side by side in a register, kSize bytes each: what one of them does leaves the others as they are.
template <u32 kSize> struct Row {
  typedef u32 Type;
  static constexpr u32 kBits = 8 * kSize;
  static constexpr u32 kLowest = kSize == 1 ? 0x01010101u : kSize == 2 ? 0x00010001u : 1;   // bit of each value
};
template <> struct Row<8> {
  typedef u64 Type;
  static constexpr u32 kBits = 64;
  static constexpr u64 kLowest = 1;
};
template <u32 kSize> using Values = typename Row<kSize>::Type;

template <u32 kSize> __device__ __forceinline__ Values<kSize> highest() {
  return Row<kSize>::kLowest << (Row<kSize>::kBits - 1);
}

// All bits of the values whose lowest bit is set in `flags`, which has no others.
template <u32 kSize> __device__ __forceinline__ Values<kSize> spread(Values<kSize> flags) {
  if constexpr (kSize >= 4) return 0 - flags;
  else return (flags << Row<kSize>::kBits) - flags;
}

template <u32 kSize> __device__ __forceinline__ Values<kSize> top_bits(Values<kSize> x) {
  return x >> (Row<kSize>::kBits - 1) & Row<kSize>::kLowest;
}

template <u32 kSize> __device__ __forceinline__ Values<kSize> add(Values<kSize> x, Values<kSize> y) {
  const Values<kSize> high = highest<kSize>();
  if constexpr (kSize >= 4) return x + y;
  else return ((x & ~high) + (y & ~high)) ^ ((x ^ y) & high);
}

template <u32 kSize> __device__ __forceinline__ Values<kSize> subtract(Values<kSize> x, Values<kSize> y) {
  const Values<kSize> high = highest<kSize>();
  if constexpr (kSize >= 4) return x - y;
  else return ((x | high) - (y & ~high)) ^ ((x ^ ~y) & high);
}

// Numbers in the order of the values: a float's sign is flipped, and of a negative one all bits are.
template <u32 kSize> __device__ __forceinline__ Values<kSize> ordered(Values<kSize> bits) {
  return bits ^ (spread<kSize>(top_bits<kSize>(bits)) | highest<kSize>());
}

template <u32 kSize> __device__ __forceinline__ Values<kSize> in_bits(Values<kSize> numbers) {
  return numbers ^ (spread<kSize>(top_bits<kSize>(~numbers)) | highest<kSize>());
}

template <u32 kSize, bool kIsSigned>
__device__ __forceinline__ Values<kSize> take(Values<kSize> raw, Values<kSize> base) {
  const Values<kSize> step =
      kIsSigned ? subtract<kSize>(ordered<kSize>(raw), ordered<kSize>(base)) : subtract<kSize>(raw, base);
  return (step << 1 & ~(Values<kSize>)Row<kSize>::kLowest) ^ spread<kSize>(top_bits<kSize>(step));
}

template <u32 kSize, bool kIsSigned>
__device__ __forceinline__ Values<kSize> undo(Values<kSize> left, Values<kSize> base) {
  const Values<kSize> step = (left >> 1 & ~highest<kSize>()) ^ spread<kSize>(left & Row<kSize>::kLowest);
  if constexpr (kIsSigned) return in_bits<kSize>(add<kSize>(step, ordered<kSize>(base)));
  else return add<kSize>(step, base);
}

template <u32 kSize, bool kIsSigned, bool kUndo>
__device__ __forceinline__ Values<kSize> of_row(Values<kSize> x, Values<kSize> y) {
  return kUndo ? undo<kSize, kIsSigned>(x, y) : take<kSize, kIsSigned>(x, y);
}

template <u32 kSize, bool kIsSigned, bool kUndo> __device__ __forceinline__ u64 of_eight(u64 x, u64 y) {
  if constexpr (kSize == 8) return of_row<8, kIsSigned, kUndo>(x, y);
  else return (u64)of_row<kSize, kIsSigned, kUndo>((u32)(x >> 32), (u32)(y >> 32)) << 32 |
              of_row<kSize, kIsSigned, kUndo>((u32)x, (u32)y);
}

template <u32 kSize, bool kUndo> __device__ __forceinline__ u64 made_of(u64 x, u64 y, u32 kind) {
  if (kind == kXor) return x ^ y;
  return kind == kSignedDifference ? of_eight<kSize, true, kUndo>(x, y) : of_eight<kSize, false, kUndo>(x, y);
}

// A sum of 8-byte words that no change of one of them leaves as it is; `i` is its number.
__device__ __forceinline__ u64 mixed(u64 word, u64 i) {
  word = (word ^ (i + 1) * 0x9E3779B97F4A7C15ull) * 0xD6E8FEB86659FD93ull;
  return word ^ word >> 32;
}

struct Pair { u64 low, high; };

__device__ __forceinline__ Pair load(const u8* from, u64 unit) {
  const uint4 q = reinterpret_cast<const uint4*>(from)[unit];
  return {(u64)q.y << 32 | q.x, (u64)q.w << 32 | q.z};
}

__device__ __forceinline__ void store(u8* to, u64 unit, Pair pair) {
  reinterpret_cast<uint4*>(to)[unit] =
      make_uint4((u32)pair.low, (u32)(pair.low >> 32), (u32)pair.high, (u32)(pair.high >> 32));
}

// The last, shorter unit, with zeros behind.
__device__ __forceinline__ Pair load_some(const u8* from, u64 unit, u32 count) {
  Pair pair = {0, 0};
#pragma unroll
  for (u32 i = 0; i < 16; ++i)
    if (i < count) (i < 8 ? pair.low : pair.high) |= (u64)from[16 * unit + i] << (8 * (i % 8));
  return pair;
}

__device__ __forceinline__ void store_some(u8* to, u64 unit, Pair pair, u32 count) {
#pragma unroll
  for (u32 i = 0; i < 16; ++i)
    if (i < count) to[16 * unit + i] = (u8)((i < 8 ? pair.low : pair.high) >> (8 * (i % 8)));
}

__device__ __forceinline__ void add_to(u64* sum, u64 mine, u64* room) {
  room[threadIdx.x] = mine;
  __syncthreads();
  for (u32 half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) room[threadIdx.x] += room[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) atomicAdd(sum, room[0]);
  __syncthreads();
}

// Reads chunk and base, writes what is left to `out`, which may be the chunk, and the chunk over the base. sums[0] grows
// by the sum of the base as it was, sums[1] by that of the chunk. Where `keep` is 0 the base stays as it is and there
// are no sums; kOnlyKeep neither reads the base nor writes `out`.
template <u32 kSize>
__device__ void take_residual(const u8* raw, u8* base, u8* out, u64 num_bytes, u32 kind, u32 keep, u64* sums) {
  __shared__ u64 room[kThreads];
  const u64 num_units = num_bytes / 16, first = (u64)blockIdx.x * (kThreads * kUnitsPerThread) + threadIdx.x;
  const bool has_base = kind != kOnlyKeep;
  u64 old_sum = 0, new_sum = 0;
  Pair now[kUnitsPerThread], before[kUnitsPerThread];
#pragma unroll
  for (u32 k = 0; k < kUnitsPerThread; ++k) {
    const u64 unit = first + k * kThreads;
    if (unit < num_units) now[k] = load(raw, unit);
    if (unit < num_units && has_base) before[k] = load(base, unit);
  }
#pragma unroll
  for (u32 k = 0; k < kUnitsPerThread; ++k) {
    const u64 unit = first + k * kThreads;
    if (unit >= num_units) break;
    if (keep) {
      store(base, unit, now[k]);
      new_sum += mixed(now[k].low, 2 * unit) + mixed(now[k].high, 2 * unit + 1);
    }
    if (has_base) {
      store(out, unit, {made_of<kSize, false>(now[k].low, before[k].low, kind),
                        made_of<kSize, false>(now[k].high, before[k].high, kind)});
      old_sum += mixed(before[k].low, 2 * unit) + mixed(before[k].high, 2 * unit + 1);
    }
  }
  const u32 rest = num_bytes % 16;
  if (rest != 0 && blockIdx.x == 0 && threadIdx.x == 0) {
    const Pair a = load_some(raw, num_units, rest);
    const Pair b = has_base ? load_some(base, num_units, rest) : Pair{0, 0};
    if (keep) store_some(base, num_units, a, rest);
    if (has_base)
      store_some(out, num_units, {made_of<kSize, false>(a.low, b.low, kind), made_of<kSize, false>(a.high, b.high, kind)},
                 rest);
    old_sum += mixed(b.low, 2 * num_units) + mixed(b.high, 2 * num_units + 1);
    new_sum += mixed(a.low, 2 * num_units) + mixed(a.high, 2 * num_units + 1);
  }
  if (!keep) return;
  if (has_base) add_to(sums, old_sum, room);
  add_to(sums + 1, new_sum, room);
}

// What is done to a piece while it is hashed.
template <u32 kSize> struct ResidualBeside {
  u8 *base, *out;   // of the piece
  u64 first_word;   // the number of its first 8 bytes in the chunk
  u32 kind;
  u64 old_sum, new_sum;
  uint4 before[kUnitsPerStep];

  __device__ __forceinline__ void load(u32 i, u32 at) { before[i] = *reinterpret_cast<const uint4*>(base + at); }

  __device__ __forceinline__ Pair put(Pair now, Pair old, u64 word) {
    old_sum += mixed(old.low, word) + mixed(old.high, word + 1);
    new_sum += mixed(now.low, word) + mixed(now.high, word + 1);
    return {made_of<kSize, false>(now.low, old.low, kind), made_of<kSize, false>(now.high, old.high, kind)};
  }

  __device__ __forceinline__ void use(u32 i, u32 at, uint4 q) {
    const uint4 b = before[i];
    const Pair left = put({(u64)q.y << 32 | q.x, (u64)q.w << 32 | q.z}, {(u64)b.y << 32 | b.x, (u64)b.w << 32 | b.z},
                          first_word + at / 8);
    *reinterpret_cast<uint4*>(base + at) = q;
    store(out + at, 0, left);
  }

  __device__ __forceinline__ void use_some(const u8* piece, u32 at, u32 count) {
    const Pair now = load_some(piece + at, 0, count), old = load_some(base + at, 0, count);
    const Pair left = put(now, old, first_word + at / 8);
    store_some(base + at, 0, now, count);
    store_some(out + at, 0, left, count);
  }
};

// As take_residual with sums, and the digests of the chunk's pieces as piece_digests gives them, from one reading of it.
// A thread block a piece; `out` is neither chunk nor base.
template <u32 kSize>
__device__ void take_and_digest(const u8* raw, u8* base, u8* out, u64 num_bytes, u32 kind, u64* sums, u64* digests,
                                u8* tail) {
  __shared__ u64 round_sums[kMaxRounds][kLanes];
  __shared__ u64 room[kThreads];
  const u64 start = (u64)blockIdx.x * kPieceBytes;
  const u8* piece = raw + start;
  const u32 size = (u32)smaller(kPieceBytes, num_bytes - start);
  const bool is_short = size <= kShortBytes;
  ResidualBeside<kSize> beside{base + start, out + start, start / 8, kind, 0, 0, {}};
  if (!is_short) sum_piece(piece, size, round_sums, beside);
  // The last stripe is no part of a round, and a short piece has none.
  const u32 rest = is_short ? 0 : (size - 1) / kStripeBytes * kStripeBytes, at = rest + 16 * threadIdx.x;
  if (at < size) beside.use_some(piece, at, size - at < 16 ? size - at : 16);
  if (is_short && threadIdx.x < size) tail[threadIdx.x] = piece[threadIdx.x];
  add_to(sums, beside.old_sum, room);   // has barriers
  add_to(sums + 1, beside.new_sum, room);
  if (is_short || threadIdx.x >= kLanes) return;
  const u64 hash = finish_piece(piece, size, round_sums);
  if (threadIdx.x == 0) digests[blockIdx.x] = hash;
}

template <u32 kSize> __device__ void undo_residual(const u8* left, u8* chunk, u64 num_bytes, u32 kind) {
  const u64 num_units = num_bytes / 16, first = (u64)blockIdx.x * (kThreads * kUnitsPerThread) + threadIdx.x;
  Pair step[kUnitsPerThread], before[kUnitsPerThread];
#pragma unroll
  for (u32 k = 0; k < kUnitsPerThread; ++k) {
    const u64 unit = first + k * kThreads;
    if (unit < num_units) step[k] = load(left, unit);
    if (unit < num_units) before[k] = load(chunk, unit);
  }
#pragma unroll
  for (u32 k = 0; k < kUnitsPerThread; ++k) {
    const u64 unit = first + k * kThreads;
    if (unit < num_units)
      store(chunk, unit, {made_of<kSize, true>(step[k].low, before[k].low, kind),
                          made_of<kSize, true>(step[k].high, before[k].high, kind)});
  }
  const u32 rest = num_bytes % 16;
  if (rest == 0 || blockIdx.x != 0 || threadIdx.x != 0) return;
  const Pair a = load_some(left, num_units, rest), b = load_some(chunk, num_units, rest);
  store_some(chunk, num_units, {made_of<kSize, true>(a.low, b.low, kind), made_of<kSize, true>(a.high, b.high, kind)},
             rest);
}

#define DEFINE_KERNELS(SIZE)                                                                                      \
  extern "C" __global__ void __launch_bounds__(kThreads) take_residual_##SIZE(                                    \
      const u8* raw, u8* base, u8* out, u64 num_bytes, u32 kind, u32 keep, u64* sums) {                           \
    take_residual<SIZE>(raw, base, out, num_bytes, kind, keep, sums);                                             \
  }                                                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads) take_and_digest_##SIZE(                                  \
      const u8* raw, u8* base, u8* out, u64 num_bytes, u32 kind, u64* sums, u64* digests, u8* tail) {             \
    take_and_digest<SIZE>(raw, base, out, num_bytes, kind, sums, digests, tail);                                  \
  }                                                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads) undo_residual_##SIZE(                                    \
      const u8* left, u8* chunk, u64 num_bytes, u32 kind) {                                                       \
    undo_residual<SIZE>(left, chunk, num_bytes, kind);                                                            \
  }

DEFINE_KERNELS(1)
DEFINE_KERNELS(2)
DEFINE_KERNELS(4)
DEFINE_KERNELS(8)
