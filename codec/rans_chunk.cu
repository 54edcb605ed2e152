// What rans_look.cu, rans_tables.cu and rans_encode.cu have in common, behind rans_units.cu.
//
// The rans encoder of RANS.md is four kernels: look at the segments, make the tables, code, gather. What stands between
// them is in global memory: `infos` (one word a segment, below), tile maps, tables, and one slot a segment, into which
// its stream is written before its place in the body is known. Raw areas go straight into the body. Nothing here waits
// for the host. No kernel reads or writes past the sizes that it is given, in bytes.

constexpr u32 kLog2Sum = 12, kSum = 1u << kLog2Sum;
constexpr u32 kPackedTableBytes = 32 + 2 * kSymbols;

// An info: kind (coded also where it may become plain), flags, sign, whether there is a tile map, flag E, coded tiles and,
// with E, raw fields. Of these there are fewer than 2^15, because the writer's segments have 64 tiles at most.
constexpr u32 kFlagShift = 2, kSignShift = 5, kMappedShift = 6, kSparseShift = 7, kTilesShift = 8, kFieldsShift = 17;

__device__ __forceinline__ bool is_sparse(u32 info) { return info >> kSparseShift & 1; }
__device__ __forceinline__ u32 coded_tiles(u32 info) { return info >> kTilesShift & 511; }

// How a chunk is cut. A warp has a segment; those of a thread block, and of a group of blocks, have one table.
struct Chunk {
  const u8* raw;
  u64 raw_bytes;
  u32 segment_tiles, num_segments;

  __device__ u32 segment() const { return blockIdx.x * kWarps + threadIdx.x / kLanes; }   // num_segments or more: none
  __device__ u64 start_of(u32 segment) const { return (u64)segment * segment_tiles * kTileBytes; }
  __device__ u32 bytes_of(u32 segment) const {
    return (u32)smaller((u64)segment_tiles * kTileBytes, raw_bytes - start_of(segment));
  }
};

// Reads 16 bytes of which `exist` are there; the others come from `filler`.
__device__ __forceinline__ uint4 load_vector(const u8* from, u32 exist, uint4 filler) {
  if (exist >= kLaneBytes) return *reinterpret_cast<const uint4*>(from);
  u32 words[4] = {filler.x, filler.y, filler.z, filler.w};
#pragma unroll
  for (u32 i = 0; i < kLaneBytes; ++i)
    if (i < exist) words[i / 4] = (words[i / 4] & ~(0xFFu << (8 * (i % 4)))) | (u32)from[i] << (8 * (i % 4));
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// How many of the 16 bytes from `at` on exist in `bytes`.
__device__ __forceinline__ u32 existing(u32 at, u32 bytes) { return at >= bytes ? 0 : smaller(bytes - at, kLaneBytes); }

__device__ __forceinline__ u32 sum_of_warp(u32 n) {
#pragma unroll
  for (u32 apart = 16; apart > 0; apart /= 2) n += __shfl_xor_sync(kAll, n, apart);
  return n;
}

// The sum of `mine` over the threads before this one of a block of kThreads; `total` becomes the sum over all.
template <class Number> __device__ Number sum_before(Number mine, Number* room, Number& total) {
  const u32 lane = lane_of_thread(), warp = threadIdx.x / kLanes;
  Number sum = mine;
#pragma unroll
  for (u32 distance = 1; distance < kLanes; distance *= 2) {
    const Number below = __shfl_up_sync(kAll, sum, distance);
    if (lane >= distance) sum += below;
  }
  __syncthreads();   // the last use of the room
  if (lane == kLanes - 1) room[warp] = sum;
  __syncthreads();
  total = 0;
  for (u32 w = 0; w < kWarps; ++w) {
    if (w < warp) sum += room[w];
    total += room[w];
  }
  return sum - mine;
}

// The sum of numbers[count], by a block of kThreads.
__device__ __forceinline__ u64 sum_of_block(const u32* numbers, u32 count, u64* room) {
  u64 mine = 0, total;
#pragma unroll 4
  for (u32 i = threadIdx.x; i < count; i += kThreads) mine += numbers[i];
  sum_before(mine, room, total);
  return total;
}
