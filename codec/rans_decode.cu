// The rans decoder of RANS.md: one kernel, one warp a segment.
//
// The host has checked preamble, tables and directory, and gives what it found in arrays; of the body itself only raw
// areas and streams are read here. Whatever bytes they hold, no access leaves a segment's own area, its padded stream
// and its place in the output: words are taken from a ring in shared memory that wraps around, and the tile map is
// checked. A segment that does not end as RANS.md says is counted in *failures.

constexpr u32 kLog2Sum = 12, kSum = 1u << kLog2Sum;   // frames with other sums are decoded by the CPU
constexpr u32 kNoTable = 128;                         // behind all numbers of tables
constexpr u32 kChunkWords = 256, kRingWords = 4 * kChunkWords;

__device__ __forceinline__ u32 lanes_below() {
  u32 mask;
  asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(mask));
  return mask;
}

// Of each slot: symbol, bits 8 … slot - start, bits 20 … frequency - 1. `frequencies` has kSymbols that sum to kSum.
__device__ void make_slots(const u16* frequencies, u32* slots, u32* room) {
  const u32 lane = lane_of_thread(), warp = threadIdx.x / kLanes, mine = frequencies[threadIdx.x];
  u32 sum = mine;
#pragma unroll
  for (u32 distance = 1; distance < kLanes; distance *= 2) {
    const u32 below = __shfl_up_sync(kAll, sum, distance);
    if (lane >= distance) sum += below;
  }
  if (lane == kLanes - 1) room[warp] = sum;
  __syncthreads();
  for (u32 w = 0; w < warp; ++w) sum += room[w];
  u32 present = __ballot_sync(kAll, mine != 0);
  while (present) {
    const u32 from = __ffs(present) - 1, count = __shfl_sync(kAll, mine, from), end = __shfl_sync(kAll, sum, from);
    for (u32 i = lane; i < count; i += kLanes)
      slots[(end - count + i) % kSum] = (warp * kLanes + from) | i << 8 | (count - 1) << 20;
    present &= present - 1;
  }
  __syncthreads();
}

struct Job {
  const u8* area;      // less the 64 bytes that the stream carries
  const u8* stream;    // behind the tile map
  u8* out;
  u32 bytes, num_coded, stream_bytes, sign, map;
  bool mapped;
};

// The last coded tile before t; there must be one.
__device__ __forceinline__ u32 coded_tile_before(u32 t, u32 map) {
  u32 w = (t - 1) / 32;
  u32 word = __shfl_sync(kAll, map, w) & (kAll >> (31 - (t - 1) % 32));
  while (word == 0) word = __shfl_sync(kAll, map, --w);
  return 32 * w + 31 - __clz(word);
}

__device__ __forceinline__ void store_vector(u8* to, u32 exist, uint4 q) {
  if (exist >= kLaneBytes) {
    *reinterpret_cast<uint4*>(to) = q;
    return;
  }
  const u32 words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
  for (u32 i = 0; i < kLaneBytes; ++i)
    if (i < exist) to[i] = (u8)(words[i / 4] >> (8 * (i % 4)));
}

__device__ __forceinline__ u32 existing(u32 at, u32 bytes) { return at >= bytes ? 0 : smaller(bytes - at, kLaneBytes); }

// Fills the tiles of a segment that are not in `map` with a pattern of 8 bytes.
__device__ void fill_tiles(const Job& job, u32 map, uint2 pattern) {
  for (u32 t = 0; t * kTileBytes < job.bytes; ++t) {
    const u32 word = __shfl_sync(kAll, map, t / 32), at = t * kTileBytes + lane_of_thread() * kLaneBytes;
    if (!(word >> t % 32 & 1))
      store_vector(job.out + at, existing(at, job.bytes), make_uint4(pattern.x, pattern.y, pattern.x, pattern.y));
  }
}

// What a lane has of the planes of one tile.
template <class C> struct Planes {
  static constexpr u32 kCount = C::kBits == 0 ? 1 : 6;
  u64 bits[kCount];
};

template <class C, u32 kLeft, u32 kLowest, u32 kPlane>
__device__ __forceinline__ void load_planes(Planes<C>& planes, const u8* plane, u32 num_coded, u32 j) {
  if constexpr (kLeft != 0) {
    constexpr u32 kWidth = widest(kLeft);
    planes.bits[kPlane] = load_bits<kWidth * C::kUnits>(plane + j * (4 * C::kUnits * kWidth),
                                                        kLowest == 0 && j == 0 ? kCarriedBytes : 0);
    load_planes<C, kLeft - kWidth, kLowest + kWidth, kPlane + 1>(planes, plane + plane_bytes<C::kUnits>(kWidth, num_coded),
                                                                 num_coded, j);
  }
}

template <class C, u32 kLeft, u32 kLowest, u32 kPlane>
__device__ __forceinline__ void unpack_planes(const Planes<C>& planes, typename C::Value (&field)[C::kUnits]) {
  if constexpr (kLeft != 0) {
    constexpr u32 kWidth = widest(kLeft);
    unpack_plane<C, kWidth, kLowest>(planes.bits[kPlane], field);
    unpack_planes<C, kLeft - kWidth, kLowest + kWidth, kPlane + 1>(planes, field);
  }
}

template <class C> __device__ __forceinline__ void add_carried(Planes<C>& planes, u32 carried) {
  if constexpr (C::kBits != 0) planes.bits[0] |= from_carried<widest(C::kBits) * C::kUnits>(carried);
}

template <class C>
__device__ __forceinline__ void store_tile(const Job& job, u32 t, const u32 (&symbol)[C::kUnits], const Planes<C>& planes) {
  typename C::Value field[C::kUnits] = {};
  unpack_planes<C, C::kBits, 0, 0>(planes, field);
  u32 words[4] = {0, 0, 0, 0};
#pragma unroll
  for (u32 i = 0; i < C::kUnits; ++i) {
    if constexpr (C::kUnitBytes == 1) {
      words[i / 4] |= (symbol[i] & 255) << (8 * (i % 4));
    } else {
      const typename C::Value v = join<C>(symbol[i] & 255, field[i], job.sign);
      if constexpr (C::kUnitBytes == 2) words[i / 2] |= v << (16 * (i % 2));
      if constexpr (C::kUnitBytes == 4) words[i] = v;
      if constexpr (C::kUnitBytes == 8) words[2 * i] = (u32)v, words[2 * i + 1] = (u32)(v >> 32);
    }
  }
  const u32 at = t * kTileBytes + lane_of_thread() * kLaneBytes;
  store_vector(job.out + at, existing(at, job.bytes), make_uint4(words[0], words[1], words[2], words[3]));
}

// The words of a stream, taken from its end. `left` of them are not yet taken; those of chunks from `loaded` on are in
// the ring, and `ahead` holds the chunk below.
struct Words {
  const u8* words;
  u32 bytes;     // of the words, padding included
  int left, loaded;
  uint4 ahead;

  __device__ __forceinline__ void fetch() {
    const u32 at = (u32)(loaded - 1) * (2 * kChunkWords) + lane_of_thread() * kLaneBytes;
    if (loaded > 0 && at < bytes) ahead = *reinterpret_cast<const uint4*>(words + at);
  }
  __device__ __forceinline__ void start(const u8* from, u32 num_words) {
    words = from;
    bytes = round_up_16(2 * num_words);
    left = (int)num_words;
    loaded = (int)((num_words + kChunkWords - 1) / kChunkWords);
    ahead = make_uint4(0, 0, 0, 0);
    fetch();
  }
  // Puts the next `most` words into the ring, which holds two chunks more than that.
  __device__ __forceinline__ void require(u16* ring, int most) {
    if (loaded <= 0 || loaded * (int)kChunkWords <= left - most) return;
    __syncwarp();   // all have read what is overwritten
    do {
      --loaded;
      reinterpret_cast<uint4*>(ring)[loaded % 4 * kLanes + lane_of_thread()] = ahead;
      fetch();
    } while (loaded > 0 && loaded * (int)kChunkWords > left - most);
    __syncwarp();
  }
};

__device__ __forceinline__ u32 get(u32& x, const u32* slots, bool active, Words& words, const u16* ring, u32 below) {
  const u32 slot = slots[x % kSum];
  const u32 next = (slot >> 20) * (x >> kLog2Sum) + ((x >> kLog2Sum) + (slot >> 8 & (kSum - 1)));
  const bool takes = active && next < kLowestState;
  const u32 mask = __ballot_sync(kAll, takes);
  words.left -= __popc(mask);
  const u32 word = ring[(u32)(words.left + __popc(mask & below)) % kRingWords];
  if (active) x = takes ? next << 16 | word : next;
  return slot;
}

template <class C>
__device__ bool decode_stream(const Job& job, const u32* slots, u16* ring) {
  constexpr u32 k = C::kUnits;
  const u32 lane = lane_of_thread(), below = lanes_below(), whole = job.bytes / kTileBytes, c = job.num_coded;
  const u32 tiles = (job.bytes + kTileBytes - 1) / kTileBytes;
  u32 x = reinterpret_cast<const u32*>(job.stream)[lane], t = tiles, symbol[k];
  Words words;
  words.start(job.stream + kStateBytes, (job.stream_bytes - kStateBytes) / 2);
  Planes<C> planes;
#pragma unroll 1
  for (u32 j = c; j-- > 0;) {
    t = job.mapped ? coded_tile_before(t, job.map) : t - 1;
    load_planes<C, C::kBits, 0, 0>(planes, job.area, c, j);
    words.require(ring, kLanes * k);
    if (t < whole) {
#pragma unroll
      for (u32 i = k; i-- > 0;) symbol[i] = get(x, slots, true, words, ring, below);
    } else {
      const u32 active = existing(t * kTileBytes + lane * kLaneBytes, job.bytes) / C::kUnitBytes;
#pragma unroll
      for (u32 i = k; i-- > 0;) symbol[i] = get(x, slots, i < active, words, ring, below);
    }
    if (words.left < 0) return false;
    if (j == 0) add_carried<C>(planes, x);
    store_tile<C>(job, t, symbol, planes);
  }
  const bool ended = C::kBits != 0 ? x >> 17 == 0 && x >> 16 == 1 : x == kLowestState;
  return words.left == 0 && __all_sync(kAll, ended);
}

template <class C> __device__ void decode_plain(const Job& job) {
  constexpr u32 k = C::kUnits;
  const u32 lane = lane_of_thread(), c = job.num_coded;
  const u8* symbols = job.stream + (C::kBits ? kCarriedBytes : 0);
  u32 t = (job.bytes + kTileBytes - 1) / kTileBytes, symbol[k];
  Planes<C> planes;
#pragma unroll 1
  for (u32 j = c; j-- > 0;) {
    t = job.mapped ? coded_tile_before(t, job.map) : t - 1;
    load_planes<C, C::kBits, 0, 0>(planes, job.area, c, j);
    if (j == 0 && C::kBits != 0) add_carried<C>(planes, reinterpret_cast<const u16*>(job.stream)[lane]);
    const u8* mine = symbols + (j * kLanes + lane) * k;
    if constexpr (k == 16) {
      const uint4 q = *reinterpret_cast<const uint4*>(mine);
      const u32 octets[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
      for (u32 i = 0; i < k; ++i) symbol[i] = octets[i / 4] >> (8 * (i % 4));
    } else {
#pragma unroll
      for (u32 i = 0; i < k; ++i) symbol[i] = mine[i];
    }
    store_tile<C>(job, t, symbol, planes);
  }
}

// `slots` is null for a plain segment.
template <class C> __device__ bool decode_segment(const Job& job, const u32* slots, u16* ring) {
  if (job.mapped) fill_tiles(job, job.map, make_uint2(0, 0));
  if (slots) return decode_stream<C>(job, slots, ring);
  decode_plain<C>(job);
  return true;
}

template <u32 kUnitBytes> __device__ bool decode_by_flags(const Job& job, u32 flags, const u32* slots, u16* ring) {
  if constexpr (kUnitBytes >= 2)
    if (flags == 1) return decode_segment<Cut<kUnitBytes, 1>>(job, slots, ring);
  if constexpr (kUnitBytes >= 4) {
    if (flags == 4) return decode_segment<Cut<kUnitBytes, 4>>(job, slots, ring);
    if (flags == 5) return decode_segment<Cut<kUnitBytes, 5>>(job, slots, ring);
  }
  if constexpr (kUnitBytes == 8) {
    if (flags == 2) return decode_segment<Cut<kUnitBytes, 2>>(job, slots, ring);
    if (flags == 3) return decode_segment<Cut<kUnitBytes, 3>>(job, slots, ring);
    if (flags == 6) return decode_segment<Cut<kUnitBytes, 6>>(job, slots, ring);
    if (flags == 7) return decode_segment<Cut<kUnitBytes, 7>>(job, slots, ring);
  }
  return decode_segment<Cut<kUnitBytes, 0>>(job, slots, ring);
}

// Reads the tile map in front of a stream. False if it is not one of `num_coded` tiles among `tiles`.
__device__ bool take_map(Job& job) {
  const u32 lane = lane_of_thread(), tiles = (job.bytes + kTileBytes - 1) / kTileBytes;
  job.map = lane < 8 ? reinterpret_cast<const u32*>(job.stream)[lane] : 0;
  job.stream += kMapBytes;
  job.stream_bytes -= kMapBytes;
  const u32 allowed = lane * 32 >= tiles ? 0 : tiles - lane * 32 >= 32 ? kAll : (1u << (tiles - lane * 32)) - 1;
  u32 sum = __popc(job.map);
#pragma unroll
  for (u32 apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(kAll, sum, apart);
  return __all_sync(kAll, (job.map & ~allowed) == 0) && sum == job.num_coded;
}

template <u32 kUnitBytes>
__device__ void decode_segments(const u8* body, u8* out, u64 raw_bytes, u32 segment_tiles, u32 num_segments,
                                const u64* entries, const u64* raw_offsets, const u64* stream_offsets,
                                const u16* frequencies, u64* failures) {
  __shared__ u32 slots[kSum];
  __shared__ uint4 rings[kWarps][2 * kRingWords / sizeof(uint4)];
  __shared__ u32 room[kWarps], wanted;
  const u32 lane = lane_of_thread(), warp = threadIdx.x / kLanes, s = blockIdx.x * kWarps + warp;
  u16* ring = reinterpret_cast<u16*>(rings[warp]);
  Job job = {};
  u32 flags = 0, table = kAll;   // what is still wanted: kNoTable for a plain segment
  bool good = true;
  if (s < num_segments) {
    const u64 entry = entries[s], start = (u64)s * segment_tiles * kTileBytes;
    const u32 low = (u32)entry, kind = low >> 20 & 3;
    job.out = out + start;
    job.bytes = (u32)smaller((u64)segment_tiles * kTileBytes, raw_bytes - start);
    job.area = body + raw_offsets[s] - kCarriedBytes;
    job.stream = body + stream_offsets[s];
    job.stream_bytes = low & 0xFFFFF;
    job.num_coded = (u32)(entry >> 34) & 511;
    job.sign = low >> 23 & 1;
    job.mapped = low >> 26 & 1;
    flags = (low >> 22 & 1) * kOneSign | (low >> 24 & 1) * kNoHigh | (low >> 25 & 1) * kShort;
    if (kind <= kConstant) {
      const uint2 pattern = kind == kZero ? make_uint2(0, 0) : *reinterpret_cast<const uint2*>(job.stream);
      fill_tiles(job, 0, pattern);
    } else {
      if (job.mapped) good = take_map(job);
      if (good) table = kind == kPlain ? kNoTable : ((u32)(entry >> 28) & 63) * 2 + (low >> 27 & 1);
    }
  }
  for (;;) {   // nearly always once: the segments of a thread block have one table
    if (threadIdx.x == 0) wanted = kAll;
    __syncthreads();
    if (lane == 0 && table != kAll) atomicMin(&wanted, table);
    __syncthreads();
    const u32 now = wanted;
    if (now == kAll) break;
    if (now != kNoTable) make_slots(frequencies + now * kSymbols, slots, room);
    if (table == now) {
      good = decode_by_flags<kUnitBytes>(job, flags, now == kNoTable ? nullptr : slots, ring);
      table = kAll;
    }
    __syncthreads();
  }
  if (!good && lane == 0) atomicAdd(failures, 1ull);
}

#define DEFINE_DECODER(SIZE)                                                                                        \
  extern "C" __global__ void __launch_bounds__(kThreads, 2) decode_segments_##SIZE(                                 \
      const u8* body, u8* out, u64 raw_bytes, u32 segment_tiles, u32 num_segments, const u64* entries,              \
      const u64* raw_offsets, const u64* stream_offsets, const u16* frequencies, u64* failures) {                   \
    decode_segments<SIZE>(body, out, raw_bytes, segment_tiles, num_segments, entries, raw_offsets, stream_offsets,  \
                          frequencies, failures);                                                                   \
  }

DEFINE_DECODER(1)
DEFINE_DECODER(2)
DEFINE_DECODER(4)
DEFINE_DECODER(8)
