// What the rans encoder finds out before it codes: kind, flags and tile map of each segment, and what the tables are
// made of: a histogram and its sums for each thread block.

constexpr u32 kSampledTiles = 4096;   // a chunk of more tiles is only sampled for the tables
constexpr u32 kZeroShare = 128;       // one unit of so many must be 0, or a segment is not looked at for the flag E

__device__ __forceinline__ u32 any_of_warp(u32 bits) {
#pragma unroll
  for (u32 apart = 16; apart > 0; apart /= 2) bits |= __shfl_xor_sync(kAll, bits, apart);
  return bits;
}

// What all units of a segment have in common, as far as they were looked at.
template <u32 kUnitBytes>
struct Evidence {
  u32 even, odd, clear, high, differs;   // bits set in even and odd words, signs that are 0, high exponents, no constant

  __device__ void look_at(uint4 q, uint2 first) {
    even |= q.x | q.z;
    odd |= q.y | q.w;
    clear |= ~(q.y & q.w);
    if (kUnitBytes < 8) clear |= ~(q.x & q.z);
    if (kUnitBytes == 8) high |= high_exponent((u64)q.y << 32) >> 8 | high_exponent((u64)q.w << 32) >> 8;
    differs |= (q.x ^ first.x) | (q.y ^ first.y) | (q.z ^ first.x) | (q.w ^ first.y);
  }
  __device__ void share() {
    even = any_of_warp(even), odd = any_of_warp(odd), clear = any_of_warp(clear);
    high = any_of_warp(high), differs = any_of_warp(differs);
  }
  __device__ u32 flags_and_sign() const {   // as they lie in an info
    if (kUnitBytes == 1) return 0;
    const u32 signs = kUnitBytes == 2 ? 0x80008000u : 0x80000000u;
    const bool set = ((kUnitBytes < 8 ? even | odd : odd) & signs) != 0, unset = (clear & signs) != 0;
    const bool one_sign = set != unset;
    const bool no_high = kUnitBytes == 8 && high == 0;
    const bool is_short = kUnitBytes == 8 ? (even & 0x1FFFFFFF) == 0 : kUnitBytes == 4 && ((even | odd) & 0xFFFF) == 0;
    return ((one_sign ? kOneSign : 0) | (no_high ? kNoHigh : 0) | (is_short ? kShort : 0)) << kFlagShift |
           (one_sign && set ? 1u : 0u) << kSignShift;
  }
};

// Where in a tile the sampled sector starts; `tile` is the tile's number in the chunk.
__device__ __forceinline__ u32 sector_of(u64 tile) { return ((u32)tile * 0x9E3779B1u >> 28) * 32; }

// `of_zero` is the symbol of a unit of 0.
template <u32 kUnitBytes>
__device__ __forceinline__ void count(uint4 q, u32 exist, u32 of_zero, u32 (*histogram)[kLanes]) {
  typedef Cut<kUnitBytes, 0> C;
  typename C::Value value[C::kUnits];
  values_of<C>(q, value);
#pragma unroll
  for (u32 i = 0; i < C::kUnits; ++i)
    if (i * kUnitBytes < exist)
      atomicAdd(&histogram[value[i] == 0 ? of_zero : symbol_of<C>(value[i])][lane_of_thread()], 1u);
}

template <u32 kUnitBytes> __device__ __forceinline__ u32 zero_units(uint4 q) {
  typedef Cut<kUnitBytes, 0> C;
  typename C::Value value[C::kUnits];
  values_of<C>(q, value);
  u32 zeros = 0;
#pragma unroll
  for (u32 i = 0; i < C::kUnits; ++i) zeros += value[i] == 0;
  return zeros;
}

// Bits of a raw field.
template <u32 kUnitBytes> __device__ __forceinline__ u32 field_bits(u32 info) {
  const u32 flags = info >> kFlagShift;
  return 8 * kUnitBytes - 8 - (flags & kOneSign ? 1 : 0) - (flags & kNoHigh ? 3 : 0) -
         (flags & kShort ? (kUnitBytes == 8 ? 29 : 16) : 0);
}

// Returns the info with the flag E, if the segment is to have it. `map` is its tile map, `info` what it is without.
template <u32 kUnitBytes> __device__ u32 with_sparse(const u8* segment, u32 bytes, u32 map, u32 info) {
  typedef Cut<kUnitBytes, 0> C;
  const u32 lane = lane_of_thread(), tiles = (bytes + kTileBytes - 1) / kTileBytes;
  u32 num_fields = 0, taken = 0;
#pragma unroll 2
  for (u32 t = 0; t < tiles; ++t) {
    const u32 at = t * kTileBytes + lane * kLaneBytes;
    const uint4 q = load_vector(segment + at, existing(at, bytes), make_uint4(0, 0, 0, 0));
    typename C::Value value[C::kUnits];
    values_of<C>(q, value);
#pragma unroll
    for (u32 i = 0; i < C::kUnits; ++i) num_fields += value[i] != 0, taken |= symbol_of<C>(value[i]) == kEmptySymbol;
  }
  num_fields = sum_of_warp(num_fields);
  const bool ends_coded = __shfl_sync(kAll, map, (tiles - 1) / 32) >> (tiles - 1) % 32 & 1;
  const u32 num_units = coded_tiles(info) * (kTileBytes / kUnitBytes) -
                        (ends_coded ? (tiles * kTileBytes - bytes) / kUnitBytes : 0);
  const u32 short_bit = kUnitBytes < 8 ? info & kShort << kFlagShift : 0;
  const u32 sparse = kCoded | short_bit | (info & 1u << kMappedShift) | 1u << kSparseShift |
                     coded_tiles(info) << kTilesShift | num_fields << kFieldsShift;
  const u32 dense_bits = num_units * field_bits<kUnitBytes>(info);
  const bool gains = num_fields * field_bits<kUnitBytes>(sparse) + 8 * kCarriedBytes < dense_bits;
  return __any_sync(kAll, taken) || !gains ? info : sparse;
}

// The first 8 bytes of a segment; of a shorter one its first unit again and again.
template <u32 kUnitBytes> __device__ __forceinline__ uint2 first_of(const u8* segment, u32 bytes) {
  u64 first = 0;
  for (u32 i = 0; i < 8; ++i) first |= (u64)segment[i < bytes ? i : i % kUnitBytes] << (8 * i);
  return make_uint2((u32)first, (u32)(first >> 32));
}

// Returns the info of a segment; lane w < 8 gets word w of its tile map.
template <u32 kUnitBytes>
__device__ u32 look_at_segment(const u8* segment, u32 bytes, u64 first_tile, u32& map) {
  const u32 lane = lane_of_thread(), tiles = (bytes + kTileBytes - 1) / kTileBytes, whole = bytes / kTileBytes;
  const uint2 first = first_of<kUnitBytes>(segment, bytes);
  const uint4 filler = make_uint4(first.x, first.y, first.x, first.y);
  map = smaller(lane * 32, tiles) == tiles ? 0 : tiles - lane * 32 >= 32 ? kAll : (1u << (tiles - lane * 32)) - 1;
  bool has_zeros = false;   // enough of them that the flag E may be worth it
  {
    Evidence<kUnitBytes> seen = {};
    u32 zero_sector = 0, zeros = 0;
#pragma unroll 4
    for (u32 base = 0; base < tiles; base += 16) {
      const u32 t = base + lane / 2, at = t * kTileBytes + sector_of(first_tile + t) + lane % 2 * kLaneBytes;
      const u32 exist = existing(at, bytes);
      const uint4 q = load_vector(segment + at, exist, filler);
      const u32 nonzero = exist ? q.x | q.y | q.z | q.w : 0;   // wrong only where the filler is in it: looked at below
      if (exist) seen.look_at(q, first);
      if (kUnitBytes > 1 && t < whole) zeros += zero_units<kUnitBytes>(q);
      const u32 of_sector = nonzero | __shfl_xor_sync(kAll, nonzero, 1);
      zero_sector |= t < tiles && (of_sector == 0 || exist < kLaneBytes);
    }
    seen.share();
    if (kUnitBytes > 1) has_zeros = sum_of_warp(zeros) * kZeroShare >= whole * (2 * kLaneBytes / kUnitBytes);
    const u32 common = seen.flags_and_sign();
    if (!__any_sync(kAll, zero_sector) && seen.differs && common == 0 && !has_zeros) return kCoded | tiles << kTilesShift;
  }
  Evidence<kUnitBytes> seen = {};
  u32 coded = 0;
  map = 0;
#pragma unroll 4
  for (u32 t = 0; t < tiles; ++t) {
    const u32 at = t * kTileBytes + lane * kLaneBytes, exist = existing(at, bytes);
    const uint4 q = load_vector(segment + at, exist, filler);
    u32 nonzero = q.x | q.y | q.z | q.w;
    if (exist < kLaneBytes) {
      const uint4 bare = load_vector(segment + at, exist, make_uint4(0, 0, 0, 0));
      nonzero = bare.x | bare.y | bare.z | bare.w;
    }
    if (exist) seen.look_at(q, first);
    const bool some = __any_sync(kAll, nonzero != 0);
    if (some && lane == t / 32) map |= 1u << t % 32;
    coded += some;
  }
  seen.share();
  if (coded == 0) return kZero;
  if (seen.differs == 0) return kConstant;
  const u32 info = kCoded | seen.flags_and_sign() | (coded < tiles ? 1u << kMappedShift : 0) | coded << kTilesShift;
  if constexpr (kUnitBytes > 1)
    if (has_zeros) return with_sparse<kUnitBytes>(segment, bytes, map, info);
  return info;
}

// Bytes of the raw area of a segment.
template <u32 kUnitBytes> __device__ u32 area_bytes(u32 info) {
  if (info % 4 != kCoded || kUnitBytes == 1) return 0;
  const u32 bits = field_bits<kUnitBytes>(info), tiles = coded_tiles(info), num_fields = info >> kFieldsShift;
  u32 bytes = 0;
  for (u32 width = 32; width > 0; width /= 2)
    if (bits & width)
      bytes += is_sparse(info) ? sparse_plane_bytes(width, num_fields) : plane_bytes<kLaneBytes / kUnitBytes>(width, tiles);
  return bytes - (is_sparse(info) ? 0 : kCarriedBytes);
}

template <u32 kUnitBytes>
__device__ void look_at_segments(const Chunk& chunk, u32* infos, u32* maps, u32* counts, uint2* block_sums,
                                 u64* raw_areas, u32* block_areas) {
  __shared__ u32 areas[kWarps];
  __shared__ uint2 sums[kWarps];
  __shared__ uint4 room[kSymbols * kLanes / 4];   // a column a lane, so that no two lanes of a warp meet
  u32(*histogram)[kLanes] = reinterpret_cast<u32(*)[kLanes]>(room);
  for (u32 i = threadIdx.x; i < kSymbols * kLanes / 4; i += kThreads) room[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  const u32 lane = lane_of_thread(), warp = threadIdx.x / kLanes, s = chunk.segment();
  u32 area = 0;
  if (s < chunk.num_segments) {
    const u8* segment = chunk.raw + chunk.start_of(s);
    const u32 bytes = chunk.bytes_of(s), tiles = (bytes + kTileBytes - 1) / kTileBytes;
    const u64 first_tile = (u64)s * chunk.segment_tiles;
    const bool sampled = chunk.raw_bytes > (u64)kSampledTiles * kTileBytes;
    u32 map;
    const u32 info = look_at_segment<kUnitBytes>(segment, bytes, first_tile, map);
    area = area_bytes<kUnitBytes>(info);
    if (lane == 0) infos[s] = info, raw_areas[s] = area;
    if (lane < 8) maps[8 * s + lane] = map;
    if (info % 4 == kCoded) {
      const uint4 zero = make_uint4(0, 0, 0, 0);
      const u32 step = sampled ? 16 : 1, of_zero = is_sparse(info) ? kEmptySymbol : symbol_of<Cut<kUnitBytes, 0>>(0);
      for (u32 base = 0; base < tiles; base += step) {
        const u32 t = sampled ? base + lane / 2 : base;
        const u32 within = sampled ? sector_of(first_tile + t) + lane % 2 * kLaneBytes : lane * kLaneBytes;
        const u32 at = t * kTileBytes + within, word = __shfl_sync(kAll, map, t / 32 % kLanes);
        const u32 exist = word >> t % 32 & 1 ? existing(at, bytes) : 0;
        if (exist) count<kUnitBytes>(load_vector(segment + at, exist, zero), exist, of_zero, histogram);
      }
    }
  }
  if (lane == 0) areas[warp] = area;
  __syncthreads();
  u32 sum = 0;
  for (u32 i = 0; i < kLanes; ++i) sum += histogram[threadIdx.x][(i + threadIdx.x) % kLanes];
  counts[blockIdx.x * kSymbols + threadIdx.x] = sum;
  const u32 weighted = sum_of_warp(sum * threadIdx.x);
  sum = sum_of_warp(sum);
  if (lane == 0) sums[warp] = make_uint2(sum, weighted);
  __syncthreads();
  if (threadIdx.x == 0) {
    uint2 both = make_uint2(0, 0);
    area = 0;
    for (u32 w = 0; w < kWarps; ++w) area += areas[w], both.x += sums[w].x, both.y += sums[w].y;
    block_areas[blockIdx.x] = area;
    block_sums[blockIdx.x] = both;
  }
}

#define DEFINE_LOOK(SIZE)                                                                                        \
  extern "C" __global__ void __launch_bounds__(kThreads) look_at_segments_##SIZE(                                \
      const u8* raw, u64 raw_bytes, u32 segment_tiles, u32 num_segments, u32* infos, u32* maps, u32* counts,     \
      uint2* block_sums, u64* raw_areas, u32* block_areas) {                                                     \
    look_at_segments<SIZE>({raw, raw_bytes, segment_tiles, num_segments}, infos, maps, counts, block_sums,       \
                           raw_areas, block_areas);                                                              \
  }

DEFINE_LOOK(1)
DEFINE_LOOK(2)
DEFINE_LOOK(4)
DEFINE_LOOK(8)
