// The plane split of FRAME.md and its inverse. Plane 0 is the top byte; a float word is rotated by one bit first.
//
// Compiled at run time by kernel_files.py: NVRTC, C++17, no headers, compute capability 7.0 and up. Base addresses are
// multiples of 16. No kernel reads or writes past the sizes that it is given, in bytes unless named otherwise.

constexpr u32 kThreads = 256;
constexpr u32 kUnitsPerThread = 4;   // in flight

__device__ __forceinline__ u32* words_of(u8* planes, u64 stride, u32 p) { return (u32*)(planes + p * stride); }
__device__ __forceinline__ const u32* words_of(const u8* planes, u64 stride, u32 p) {
  return (const u32*)(planes + p * stride);
}

// Each of the three below says how one unit of whole vectors is split and joined; `u` numbers the units of the chunk.

struct Two {   // bytes a word; a unit is 16 bytes, 8 words
  static constexpr u32 kSize = 2;
  struct Unit { uint4 q; };
  static __device__ u32 left(u32 x) { return (x << 1 & 0xFFFEFFFEu) | (x >> 15 & 0x00010001u); }
  static __device__ u32 right(u32 x) { return (x >> 1 & 0x7FFF7FFFu) | (x << 15 & 0x80008000u); }

  static __device__ void split(Unit unit, u8* planes, u64 stride, u64 u, u32 rotate) {
    uint4 q = unit.q;
    if (rotate) q = make_uint4(left(q.x), left(q.y), left(q.z), left(q.w));
    ((uint2*)planes)[u] = make_uint2(__byte_perm(q.x, q.y, 0x7531), __byte_perm(q.z, q.w, 0x7531));
    ((uint2*)(planes + stride))[u] = make_uint2(__byte_perm(q.x, q.y, 0x6420), __byte_perm(q.z, q.w, 0x6420));
  }
  static __device__ Unit gather(const u8* planes, u64 stride, u64 u) {
    const uint2 high = ((const uint2*)planes)[u], low = ((const uint2*)(planes + stride))[u];
    return {make_uint4(low.x, low.y, high.x, high.y)};
  }
  static __device__ Unit join(Unit unit, u32 rotate) {
    const uint4 p = unit.q;
    uint4 q = make_uint4(__byte_perm(p.x, p.z, 0x5140), __byte_perm(p.x, p.z, 0x7362),
                         __byte_perm(p.y, p.w, 0x5140), __byte_perm(p.y, p.w, 0x7362));
    if (rotate) q = make_uint4(right(q.x), right(q.y), right(q.z), right(q.w));
    return {q};
  }
};

struct Four {   // a unit is 16 bytes, 4 words
  static constexpr u32 kSize = 4;
  struct Unit { uint4 q; };
  static __device__ u32 left(u32 x) { return x << 1 | x >> 31; }
  static __device__ u32 right(u32 x) { return x >> 1 | x << 31; }

  static __device__ void split(Unit unit, u8* planes, u64 stride, u64 u, u32 rotate) {
    uint4 q = unit.q;
    if (rotate) q = make_uint4(left(q.x), left(q.y), left(q.z), left(q.w));
    transpose_4x4(q.x, q.y, q.z, q.w);
    words_of(planes, stride, 0)[u] = q.w;
    words_of(planes, stride, 1)[u] = q.z;
    words_of(planes, stride, 2)[u] = q.y;
    words_of(planes, stride, 3)[u] = q.x;
  }
  static __device__ Unit gather(const u8* planes, u64 stride, u64 u) {
    return {make_uint4(words_of(planes, stride, 3)[u], words_of(planes, stride, 2)[u],
                       words_of(planes, stride, 1)[u], words_of(planes, stride, 0)[u])};
  }
  static __device__ Unit join(Unit unit, u32 rotate) {
    uint4 q = unit.q;
    transpose_4x4(q.x, q.y, q.z, q.w);
    if (rotate) q = make_uint4(right(q.x), right(q.y), right(q.z), right(q.w));
    return {q};
  }
};

struct Eight {   // a unit is 32 bytes, 4 words; their low and their high halves are transposed on their own
  static constexpr u32 kSize = 8;
  struct Unit { uint4 front, back; };

  static __device__ void split(Unit unit, u8* planes, u64 stride, u64 u, u32 rotate) {
    u32 low[4] = {unit.front.x, unit.front.z, unit.back.x, unit.back.z};
    u32 high[4] = {unit.front.y, unit.front.w, unit.back.y, unit.back.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const u32 l = low[i], h = high[i];
      low[i] = rotate ? l << 1 | h >> 31 : l;
      high[i] = rotate ? h << 1 | l >> 31 : h;
    }
    transpose_4x4(low[0], low[1], low[2], low[3]);
    transpose_4x4(high[0], high[1], high[2], high[3]);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      words_of(planes, stride, 3 - i)[u] = high[i];
      words_of(planes, stride, 7 - i)[u] = low[i];
    }
  }
  static __device__ Unit gather(const u8* planes, u64 stride, u64 u) {
    return {make_uint4(words_of(planes, stride, 7)[u], words_of(planes, stride, 6)[u],
                       words_of(planes, stride, 5)[u], words_of(planes, stride, 4)[u]),
            make_uint4(words_of(planes, stride, 3)[u], words_of(planes, stride, 2)[u],
                       words_of(planes, stride, 1)[u], words_of(planes, stride, 0)[u])};
  }
  static __device__ Unit join(Unit unit, u32 rotate) {
    u32 low[4] = {unit.front.x, unit.front.y, unit.front.z, unit.front.w};
    u32 high[4] = {unit.back.x, unit.back.y, unit.back.z, unit.back.w};
    transpose_4x4(low[0], low[1], low[2], low[3]);
    transpose_4x4(high[0], high[1], high[2], high[3]);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const u32 l = low[i], h = high[i];
      low[i] = rotate ? l >> 1 | h << 31 : l;
      high[i] = rotate ? h >> 1 | l << 31 : h;
    }
    return {make_uint4(low[0], high[0], low[1], high[1]), make_uint4(low[2], high[2], low[3], high[3])};
  }
};

// A thread takes kUnitsPerThread units. The words behind the last whole unit go one by one, by the first thread block.
template <class Word>
__device__ void split_planes(const u8* raw, u8* planes, u64 stride, u64 raw_bytes, u32 rotate) {
  using Unit = typename Word::Unit;
  const u64 num_units = raw_bytes / sizeof(Unit), first = (u64)blockIdx.x * (kThreads * kUnitsPerThread) + threadIdx.x;
  Unit held[kUnitsPerThread];
#pragma unroll
  for (u32 k = 0; k < kUnitsPerThread; ++k)
    if (first + k * kThreads < num_units) held[k] = ((const Unit*)raw)[first + k * kThreads];
#pragma unroll
  for (u32 k = 0; k < kUnitsPerThread; ++k)
    if (first + k * kThreads < num_units) Word::split(held[k], planes, stride, first + k * kThreads, rotate);

  constexpr u32 size = Word::kSize;
  const u64 word = num_units * (sizeof(Unit) / size) + threadIdx.x;
  if (blockIdx.x != 0 || word >= raw_bytes / size) return;
  u64 value = 0;
  for (u32 i = 0; i < size; ++i) value |= (u64)raw[word * size + i] << (8 * i);
  if (rotate) value = value << 1 | (value >> (8 * size - 1) & 1);
  for (u32 p = 0; p < size; ++p) planes[p * stride + word] = (u8)(value >> (8 * (size - 1 - p)));
}

template <class Word>
__device__ void join_planes(const u8* planes, u64 stride, u8* raw, u64 raw_bytes, u32 rotate) {
  using Unit = typename Word::Unit;
  const u64 num_units = raw_bytes / sizeof(Unit), first = (u64)blockIdx.x * (kThreads * kUnitsPerThread) + threadIdx.x;
  Unit held[kUnitsPerThread];
#pragma unroll
  for (u32 k = 0; k < kUnitsPerThread; ++k)
    if (first + k * kThreads < num_units) held[k] = Word::gather(planes, stride, first + k * kThreads);
#pragma unroll
  for (u32 k = 0; k < kUnitsPerThread; ++k)
    if (first + k * kThreads < num_units) ((Unit*)raw)[first + k * kThreads] = Word::join(held[k], rotate);

  constexpr u32 size = Word::kSize;
  const u64 word = num_units * (sizeof(Unit) / size) + threadIdx.x;
  if (blockIdx.x != 0 || word >= raw_bytes / size) return;
  u64 value = 0;
  for (u32 p = 0; p < size; ++p) value = value << 8 | planes[p * stride + word];
  if (rotate) value = value >> 1 | (value & 1) << (8 * size - 1);
  for (u32 i = 0; i < size; ++i) raw[word * size + i] = (u8)(value >> (8 * i));
}

#define DEFINE_KERNELS(WORD, SIZE)                                                                       \
  extern "C" __global__ void __launch_bounds__(kThreads) split_planes_##SIZE(                            \
      const u8* raw, u8* planes, u64 stride, u64 raw_bytes, u32 rotate) {                                \
    split_planes<WORD>(raw, planes, stride, raw_bytes, rotate);                                          \
  }                                                                                                      \
  extern "C" __global__ void __launch_bounds__(kThreads) join_planes_##SIZE(                             \
      const u8* planes, u64 stride, u8* raw, u64 raw_bytes, u32 rotate) {                                \
    join_planes<WORD>(planes, stride, raw, raw_bytes, rotate);                                           \
  }

DEFINE_KERNELS(Two, 2)
DEFINE_KERNELS(Four, 4)
DEFINE_KERNELS(Eight, 8)
