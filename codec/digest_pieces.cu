// The digests of FRAME.md: XXH3-64 with seed 0 and the default secret, after xxHash's doc/xxhash_spec.md. What the files
// that hash pieces have in common; kernel_files.py puts it in front of each.
//
// Compiled at run time by kernel_files.py: NVRTC, C++17, no headers, compute capability 7.0 and up. Base addresses are
// multiples of 16. No kernel reads or writes past the sizes that it is given, in bytes unless named otherwise.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 kThreads = 256;
constexpr u32 kPieceBytes = 65536, kStripeBytes = 64, kStripesPerRound = 16, kLanes = 8;
constexpr u32 kShortBytes = 240;   // up to here XXH3 takes another path, which is left to the host
constexpr u32 kMaxRounds = kPieceBytes / (kStripeBytes * kStripesPerRound);

constexpr u64 kPrime32_1 = 0x9E3779B1ull, kPrime32_2 = 0x85EBCA77ull, kPrime32_3 = 0xC2B2AE3Dull;
constexpr u64 kPrime64_1 = 0x9E3779B185EBCA87ull, kPrime64_2 = 0xC2B2AE3D27D4EB4Full,
              kPrime64_3 = 0x165667B19E3779F9ull, kPrime64_4 = 0x85EBCA77C2B2AE63ull,
              kPrime64_5 = 0x27D4EB2F165667C5ull;

__constant__ u64 kSecret[24] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
    0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull,
    0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull};

__constant__ u64 kSeeds[kLanes] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                   kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};

__device__ __forceinline__ u64 smaller(u64 a, u64 b) { return a < b ? a : b; }

__device__ __forceinline__ u64 secret_at(u32 byte) {
  u32 word = byte / 8, shift = byte % 8 * 8;
  return shift ? (kSecret[word] >> shift) | (kSecret[word + 1] << (64 - shift)) : kSecret[word];
}

__device__ __forceinline__ u64 load_unaligned(const u8* from) {
  u64 value = 0;
  for (u32 i = 0; i < 8; ++i) value |= (u64)from[i] << (8 * i);
  return value;
}

__device__ __forceinline__ u64 multiply_halves(u64 key) { return (key & 0xFFFFFFFFull) * (key >> 32); }

// Adds up what the stripes of a round (1,024 bytes) bring to each of the eight accumulators. The sum does not depend on
// the accumulators, so all rounds of a piece go side by side; only the scrambles between rounds are a chain.
//
// A warp takes four rounds at a time. Of each, a thread holds 16 bytes, that is accumulators 2 * pair and 2 * pair + 1,
// of stripes `row` and `row + 8`. The eight rows are then added up so that each row ends with one of the eight sums
// (four rounds, even and odd accumulator) instead of all with all.
constexpr u32 kRoundsPerStep = 4;

//
// `beside.load(i, at)` is called where a thread has its i-th 16 bytes loaded, `at` bytes into the piece, and
// `beside.use(i, at, q)` when it has them.
constexpr u32 kUnitsPerStep = 2 * kRoundsPerStep;

struct NothingBeside {
  __device__ __forceinline__ void load(u32, u32) {}
  __device__ __forceinline__ void use(u32, u32, uint4) {}
};

template <class Beside>
__device__ __forceinline__ void sum_rounds(const u8* piece, u32 first_round, u32 num_stripes, const u64 (&keys)[2][2],
                                           u64 (*sums)[kLanes], Beside& beside) {
  const u32 lane = threadIdx.x % 32, pair = lane % 4, row = lane / 4, first_stripe = first_round * kStripesPerRound;
  uint4 held[kRoundsPerStep][2];
#pragma unroll
  for (u32 r = 0; r < kRoundsPerStep; ++r) {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const u32 stripe = first_stripe + r * kStripesPerRound + 8 * half + row;
      if (stripe < num_stripes) {
        held[r][half] = *reinterpret_cast<const uint4*>(piece + stripe * kStripeBytes + pair * 16);
        beside.load(2 * r + half, stripe * kStripeBytes + pair * 16);
      }
    }
  }
  u64 values[2 * kRoundsPerStep];
#pragma unroll
  for (u32 r = 0; r < kRoundsPerStep; ++r) {
    values[2 * r] = values[2 * r + 1] = 0;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const u32 stripe = first_stripe + r * kStripesPerRound + 8 * half + row;
      if (stripe < num_stripes) {
        const uint4 q = held[r][half];
        const u64 first = (u64)q.y << 32 | q.x, second = (u64)q.w << 32 | q.z;
        values[2 * r] += second + multiply_halves(first ^ keys[half][0]);
        values[2 * r + 1] += first + multiply_halves(second ^ keys[half][1]);
        beside.use(2 * r + half, stripe * kStripeBytes + pair * 16, q);
      }
    }
  }
#pragma unroll
  for (u32 count = kRoundsPerStep; count > 0; count /= 2) {   // count * 4 lanes apart; count values stay with each row
    const bool upper = row & count;
#pragma unroll
    for (u32 i = 0; i < count; ++i) {
      const u64 sent = upper ? values[i] : values[i + count], kept = upper ? values[i + count] : values[i];
      values[i] = kept + __shfl_xor_sync(0xFFFFFFFFu, sent, 4 * count);
    }
  }
  sums[first_round + row / 2][2 * pair + row % 2] = values[0];
}

// Runs on eight threads: the chain of scrambles, the last stripe, and the merge. Thread 0 returns the hash.
__device__ u64 finish_piece(const u8* piece, u32 length, const u64 (*sums)[kLanes]) {
  const u32 lane = threadIdx.x, num_stripes = (length - 1) / kStripeBytes, num_rounds = num_stripes / kStripesPerRound;
  const u64 last = load_unaligned(piece + length - kStripeBytes + 8 * lane);
  const u64 scramble_key = secret_at(128 + 8 * lane);
  u64 state = kSeeds[lane];
  for (u32 round = 0; round < num_rounds; ++round) {
    state += sums[round][lane];
    state = ((state ^ state >> 47) ^ scramble_key) * kPrime32_1;
  }
  if (num_stripes % kStripesPerRound) state += sums[num_rounds][lane];
  state += __shfl_xor_sync(0xFFu, last, 1) + multiply_halves(last ^ secret_at(121 + 8 * lane));

  const u64 mine = state ^ secret_at(11 + 8 * lane), other = __shfl_xor_sync(0xFFu, mine, 1);
  u64 folded = (mine * other) ^ __umul64hi(mine, other);   // the same on both threads of a pair
  folded += __shfl_xor_sync(0xFFu, folded, 2);
  folded += __shfl_xor_sync(0xFFu, folded, 4);
  u64 hash = (u64)length * kPrime64_1 + folded;
  hash ^= hash >> 37;
  hash *= 0x165667919E3779F9ull;
  return hash ^ hash >> 32;
}

// All 256 threads: the sums of all rounds of a piece of more than kShortBytes. A barrier must follow.
template <class Beside>
__device__ __forceinline__ void sum_piece(const u8* piece, u32 size, u64 (*sums)[kLanes], Beside& beside) {
  const u32 num_stripes = (size - 1) / kStripeBytes, row = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
  const u64 keys[2][2] = {{kSecret[row + 2 * pair], kSecret[row + 2 * pair + 1]},
                          {kSecret[row + 2 * pair + 8], kSecret[row + 2 * pair + 9]}};
  constexpr u32 kRoundsPerWarp = kMaxRounds / (kThreads / 32);
  const u32 begin = threadIdx.x / 32 * kRoundsPerWarp;
#pragma unroll
  for (u32 round = begin; round < begin + kRoundsPerWarp; round += kRoundsPerStep)
    if (round * kStripesPerRound < num_stripes) sum_rounds(piece, round, num_stripes, keys, sums, beside);
}

