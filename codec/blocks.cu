// The blocked body of FRAME.md: which blocks are constant, nvCOMP's batch, the table, gather and scatter.
//
// Compiled at run time by kernel_files.py: NVRTC, C++17, no headers, compute capability 7.0 and up. Base addresses are
// multiples of 16. No kernel reads or writes past the sizes that it is given, in bytes unless named otherwise.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 kThreads = 256;          // of every kernel but append_blocks
constexpr u32 kVectorsPerThread = 4;   // 16-byte vectors that a thread has in flight
constexpr u32 kTileBytes = 16 * kThreads * kVectorsPerThread;

constexpr u32 kStored = 0, kCoded = 1, kConstant = 2;
constexpr u32 kPreambleBytes = 16, kKindShift = 30, kStoredMask = (1u << kKindShift) - 1;
constexpr u32 kEnd = 0, kBodyBytes = 1, kRefused = 2;   // words of a report: see device_report.py

__device__ __forceinline__ u64 round_up_16(u64 n) { return (n + 15) & ~15ull; }
__device__ __forceinline__ u64 smaller(u64 a, u64 b) { return a < b ? a : b; }

// Block i is block i % per_plane of plane i / per_plane; plane p starts at source + p * stride. The first
// coded_per_plane blocks of each of the first coded_planes planes are candidates: they are given to nvCOMP.

__device__ __forceinline__ u64 raw_size(u32 i, u32 per_plane, u64 plane_bytes, u32 block_bytes) {
  return smaller(block_bytes, plane_bytes - (u64)(i % per_plane) * block_bytes);
}

__device__ __forceinline__ u64 start_of(u32 i, u32 per_plane, u64 stride, u32 block_bytes) {
  return i / per_plane * stride + (u64)(i % per_plane) * block_bytes;
}

// One thread block a block: is every byte the same? Stops at the first tile that is not.
extern "C" __global__ void __launch_bounds__(kThreads)
find_constant_blocks(const u8* source, u64 stride, u64 plane_bytes, u32 block_bytes, u32 per_plane, u8* constant) {
  const u32 i = blockIdx.x, size = (u32)raw_size(i, per_plane, plane_bytes, block_bytes), num_vectors = size / 16;
  const u8* block = source + start_of(i, per_plane, stride, block_bytes);
  const u32 splat = block[0] * 0x01010101u;
  int differs = threadIdx.x < size % 16 && block[num_vectors * 16 + threadIdx.x] != block[0];
  for (u32 base = 0; base < num_vectors; base += kThreads * kVectorsPerThread) {
#pragma unroll
    for (u32 k = 0; k < kVectorsPerThread; ++k) {
      const u32 v = base + k * kThreads + threadIdx.x;
      if (v >= num_vectors) continue;
      const uint4 q = reinterpret_cast<const uint4*>(block)[v];
      differs |= ((q.x ^ splat) | (q.y ^ splat) | (q.z ^ splat) | (q.w ^ splat)) != 0;
    }
    differs = __syncthreads_or(differs);
    if (differs) break;
  }
  differs = __syncthreads_or(differs);
  if (threadIdx.x == 0) constant[i] = !differs;
}

// Writes nvCOMP's batch for `count` candidates from `first` on: where each lies, how long it is, where its slot is.
extern "C" __global__ void __launch_bounds__(kThreads)
lay_out_candidates(const u8* source, u64 stride, u64 plane_bytes, u32 block_bytes, u32 coded_per_plane, u32 first,
                   u32 count, u8* slots, u64 slot_bytes, u64* inputs, u64* input_bytes, u64* outputs) {
  const u32 k = blockIdx.x * kThreads + threadIdx.x;
  if (k >= count) return;
  const u32 candidate = first + k;
  inputs[k] = (u64)(source + start_of(candidate, coded_per_plane, stride, block_bytes));
  input_bytes[k] = raw_size(candidate, coded_per_plane, plane_bytes, block_bytes);
  outputs[k] = (u64)(slots + k * slot_bytes);
}

// Decides the kind of blocks low … high - 1, writes their entries of the body's table and where each goes.
// One thread block of 1,024 threads. The call with low = 0 starts the body, the one with high = num_blocks ends it:
// report[kBodyBytes] becomes its length, or 0 if it would not be shorter than raw_bytes. Coded blocks that are not
// shorter, or that nvCOMP refused (counted in report[kRefused]), are stored. The table always lies inside raw_bytes.
extern "C" __global__ void __launch_bounds__(1024)
append_blocks(u64* report, u8* body, u64* offsets, const u8* constant, const u64* coded_bytes, const int* statuses,
              u32 first, u32 low, u32 high, u32 num_blocks, u32 num_planes, u32 per_plane, u64 plane_bytes,
              u32 block_bytes, u32 coded_planes, u32 coded_per_plane, u64 raw_bytes) {
  __shared__ u64 warp_ends[32];
  __shared__ u64 end;
  u32* table = reinterpret_cast<u32*>(body + kPreambleBytes);
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    end = report[kEnd];
    if (low == 0) {
      end = round_up_16(kPreambleBytes + 4ull * num_blocks);
      report[kRefused] = 0;
      *reinterpret_cast<uint4*>(body) = make_uint4(block_bytes, num_planes, num_blocks, 0);
      for (u32 i = num_blocks; i < (end - kPreambleBytes) / 4; ++i) table[i] = 0;
    }
  }
  __syncthreads();
  for (u32 base = low; base < high; base += 1024) {
    const u32 i = base + threadIdx.x;
    u64 padded = 0;
    if (i < high) {
      const u32 size = (u32)raw_size(i, per_plane, plane_bytes, block_bytes), plane = i / per_plane, j = i % per_plane;
      u32 kind = kStored, stored = size;
      if (constant[i]) {
        kind = kConstant;
        stored = 1;
      } else if (plane < coded_planes && j < coded_per_plane) {
        const u32 k = plane * coded_per_plane + j - first;
        if (statuses[k] != 0) {
          atomicAdd(&report[kRefused], 1ull);
        } else if (coded_bytes[k] >= 1 && coded_bytes[k] < size) {
          kind = kCoded;
          stored = (u32)coded_bytes[k];
        }
      }
      table[i] = kind << kKindShift | stored;
      padded = round_up_16(stored);
    }
    u64 sum = padded;   // inclusive prefix sum over the warp, then over the warps
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
      const u64 below = __shfl_up_sync(0xFFFFFFFFu, sum, distance);
      if (lane >= distance) sum += below;
    }
    if (lane == 31) warp_ends[warp] = sum;
    __syncthreads();
    u64 before = end, total = 0;
    for (u32 w = 0; w < 32; ++w) {
      if (w < warp) before += warp_ends[w];
      total += warp_ends[w];
    }
    if (i < high) offsets[i] = before + sum - padded;
    __syncthreads();
    if (threadIdx.x == 0) end += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    report[kEnd] = end;
    if (high == num_blocks) report[kBodyBytes] = end < raw_bytes ? end : 0;
  }
}

// Copies up to kTileBytes by one thread block, and fills the last vector with zeros where `pad` is set.
__device__ void copy_tile(u8* target, const u8* source, u32 size, bool pad) {
  const u32 num_vectors = size / 16;
  uint4 held[kVectorsPerThread];
#pragma unroll
  for (u32 k = 0; k < kVectorsPerThread; ++k) {
    const u32 v = k * kThreads + threadIdx.x;
    if (v < num_vectors) held[k] = reinterpret_cast<const uint4*>(source)[v];
  }
#pragma unroll
  for (u32 k = 0; k < kVectorsPerThread; ++k) {
    const u32 v = k * kThreads + threadIdx.x;
    if (v < num_vectors) reinterpret_cast<uint4*>(target)[v] = held[k];
  }
  const u32 at = num_vectors * 16 + threadIdx.x;
  if (threadIdx.x < 16 && size % 16 && (pad || at < size)) target[at] = at < size ? source[at] : 0;
}

// Puts blocks low … into the body. `tiles` thread blocks a block. A block that would end past raw_bytes is left out:
// the body is not used then.
extern "C" __global__ void __launch_bounds__(kThreads)
gather_blocks(u8* body, const u64* offsets, const u8* source, u64 stride, u32 block_bytes, u32 per_plane,
              const u8* slots, u64 slot_bytes, u32 first, u32 coded_per_plane, u32 low, u32 tiles, u64 raw_bytes) {
  const u32 i = low + blockIdx.x / tiles, begin = blockIdx.x % tiles * kTileBytes;
  const u32 entry = reinterpret_cast<const u32*>(body + kPreambleBytes)[i];
  const u32 kind = entry >> kKindShift, stored = entry & kStoredMask;
  const u64 offset = offsets[i];
  if (begin >= stored || offset + round_up_16(stored) > raw_bytes) return;
  const u8* block = source + start_of(i, per_plane, stride, block_bytes);
  if (kind == kCoded) block = slots + (u64)(i / per_plane * coded_per_plane + i % per_plane - first) * slot_bytes;
  copy_tile(body + offset + begin, block + begin, (u32)smaller(kTileBytes, stored - begin), true);
}

// Puts stored and constant blocks where they belong. items[4 * k]: address in the body, target, raw size, kind.
extern "C" __global__ void __launch_bounds__(kThreads)
place_blocks(const u64* items, u32 tiles) {
  const u64* item = items + 4ull * (blockIdx.x / tiles);
  const u64 begin = (u64)(blockIdx.x % tiles) * kTileBytes, size = item[2];
  if (begin >= size) return;
  const u8* block = reinterpret_cast<const u8*>(item[0]);
  u8* target = reinterpret_cast<u8*>(item[1]) + begin;
  const u32 here = (u32)smaller(kTileBytes, size - begin);
  if (item[3] == kStored) {
    copy_tile(target, block + begin, here, false);
    return;
  }
  const u32 splat = block[0] * 0x01010101u;
  for (u32 v = threadIdx.x; v < here / 16; v += kThreads)
    reinterpret_cast<uint4*>(target)[v] = make_uint4(splat, splat, splat, splat);
  if (threadIdx.x < here % 16) target[here / 16 * 16 + threadIdx.x] = (u8)splat;
}

// Counts the coded blocks that nvCOMP did not decode to exactly the bytes expected.
extern "C" __global__ void __launch_bounds__(kThreads)
count_failures(const int* statuses, const u64* actual_bytes, const u64* expected_bytes, u32 count, u64* failures) {
  const u32 k = blockIdx.x * kThreads + threadIdx.x;
  if (k < count && (statuses[k] != 0 || actual_bytes[k] != expected_bytes[k])) atomicAdd(failures, 1ull);
}
