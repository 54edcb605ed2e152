// Copies many pieces of device memory in one launch.
//
// Compiled at run time by kernel_files.py: NVRTC, C++17, no headers, compute capability 7.0 and up. Sources and
// targets have any alignment. No kernel reads or writes past the sizes that it is given.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 kThreads = 256;
constexpr u32 kTileBytes = 16384;

__device__ __forceinline__ u64 smaller(u64 a, u64 b) { return a < b ? a : b; }

// Copies up to kTileBytes, whole words, from and to multiples of the word's size. A thread has several loads in flight.
template <class Word>
__device__ __forceinline__ void copy_tile(u8* target, const u8* source, u32 size) {
  constexpr u32 kInFlight = sizeof(Word) == 16 ? 4 : 8;
  const u32 num_words = size / sizeof(Word);
  for (u32 base = threadIdx.x; base < num_words; base += kThreads * kInFlight) {
    Word held[kInFlight];
#pragma unroll
    for (u32 k = 0; k < kInFlight; ++k)
      if (base + k * kThreads < num_words) held[k] = reinterpret_cast<const Word*>(source)[base + k * kThreads];
#pragma unroll
    for (u32 k = 0; k < kInFlight; ++k)
      if (base + k * kThreads < num_words) reinterpret_cast<Word*>(target)[base + k * kThreads] = held[k];
  }
}

// Source and target are equal modulo the word's size. The bytes before the first and behind the last whole word go one
// by one; the tiles between them go in turn to the `parts` thread blocks of the piece.
template <class Word>
__device__ __forceinline__ void copy_piece(u8* target, const u8* source, u64 size, u32 part, u32 parts) {
  const u64 head = smaller(size, (0 - reinterpret_cast<u64>(target)) % sizeof(Word));
  const u64 middle = (size - head) / sizeof(Word) * sizeof(Word), tail = size - head - middle;
  if (part == 0) {
    if (threadIdx.x < head) target[threadIdx.x] = source[threadIdx.x];
    if (threadIdx.x < tail) target[head + middle + threadIdx.x] = source[head + middle + threadIdx.x];
  }
  for (u64 begin = (u64)part * kTileBytes; begin < middle; begin += (u64)parts * kTileBytes)
    copy_tile<Word>(target + head + begin, source + head + begin, (u32)smaller(kTileBytes, middle - begin));
}

// As copy_piece, by the longest word that both addresses allow.
__device__ __forceinline__ void copy_any(u64 target_at, u64 source_at, u64 size, u32 part, u32 parts) {
  const u8* source = reinterpret_cast<const u8*>(source_at);
  u8* target = reinterpret_cast<u8*>(target_at);
  const u32 apart = (u32)(source_at ^ target_at);
  if (apart % 16 == 0)
    copy_piece<uint4>(target, source, size, part, parts);
  else if (apart % 8 == 0)
    copy_piece<u64>(target, source, size, part, parts);
  else if (apart % 4 == 0)
    copy_piece<u32>(target, source, size, part, parts);
  else if (apart % 2 == 0)
    copy_piece<u16>(target, source, size, part, parts);
  else
    copy_piece<u8>(target, source, size, part, parts);
}

// items[3 * k]: source, target (less target_base) and bytes of piece k. `parts` thread blocks a piece. The sources are
// memory that others write at other times, so they are read by plain loads: nothing here says __restrict__ or __ldg.
extern "C" __global__ void __launch_bounds__(kThreads)
copy_pieces(const u64* items, u64 target_base, u32 parts) {
  const u64* item = items + 3ull * (blockIdx.x / parts);
  copy_any(item[1] + target_base, item[0], item[2], blockIdx.x % parts, parts);
}

// Copies one piece, to page-locked memory of the host, say, with all thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads)
copy_bytes(u64 source, u64 target, u64 size) {
  copy_any(target, source, size, blockIdx.x, gridDim.x);
}
