// The rans decoder of RANS.md: one kernel, one warp a segment.
//
// The host has checked preamble, tables and directory, and gives what it found in arrays; of the body itself only raw
// areas and streams are read here. Whatever bytes they hold, no access leaves a segment's own area, its padded stream
// and its place in the output: words are taken from shared memory, which has room below them for a tile that takes too
// many; the tile map is checked, and before a tile's raw fields are read (flag E) that there are as many. A segment that
// does not end as RANS.md says is counted in *failures.

constexpr u32 kLog2Sum = 12, kSum = 1u << kLog2Sum;   // frames with other sums are decoded by the CPU
constexpr u32 kNoTable = 128;                         // behind all numbers of tables
constexpr u32 kBatchBytes = kLanes * kLaneBytes;   // of a stream, loaded together
constexpr u32 kRowBytes = 3 * kBatchBytes;           // of a warp: a batch beside what a tile may take, 1024 bytes
constexpr u32 kSlotsOfThread = kSum / kThreads;

// What a thread block keeps in shared memory. A slot: bits 0 … slot - start, 12 … symbol, 20 … frequency - 1.
struct Room {
  uint4 below[2 * kBatchBytes / sizeof(uint4)];   // so far a damaged stream may make a warp read below its row
  uint4 rows[kWarps][kRowBytes / sizeof(uint4)];
  uint4 slots[kSum / 4];
  u32 ends[kSymbols];   // of the symbols that there are: bits 0 … start + frequency, 16 … symbol
  u32 sums[kWarps], wanted;
};

// Fills room.slots, of frequencies that sum to kSum.
__device__ void make_slots(const u16* frequencies, Room& room) {
  const u32 lane = lane_of_thread(), warp = threadIdx.x / kLanes, mine = frequencies[threadIdx.x];
  u32 sum = mine | (mine != 0 ? 1u << 16 : 0);   // and how many symbols there are
#pragma unroll
  for (u32 distance = 1; distance < kLanes; distance *= 2) {
    const u32 below = __shfl_up_sync(kAll, sum, distance);
    if (lane >= distance) sum += below;
  }
  if (lane == kLanes - 1) room.sums[warp] = sum;
  __syncthreads();
  for (u32 w = 0; w < warp; ++w) sum += room.sums[w];
  if (mine != 0) room.ends[(sum >> 16) - 1] = (sum & 0xFFFF) | threadIdx.x << 16;
  u32 count = 0;
  for (u32 w = 0; w < kWarps; ++w) count += room.sums[w] >> 16;
  __syncthreads();
  const u32 first = kSlotsOfThread * threadIdx.x;
  u32 at = 0;   // of the first symbol that ends behind `first`
  for (u32 step = kSymbols / 2; step > 0; step /= 2)
    if (at + step <= count && (room.ends[at + step - 1] & 0xFFFF) <= first) at += step;
  u32 start = at ? room.ends[at - 1] & 0xFFFF : 0, symbol = room.ends[at];
#pragma unroll 1
  for (u32 base = first; base < first + kSlotsOfThread; base += 4) {
    u32 slots[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      if (base + i >= (symbol & 0xFFFF)) {
        start = symbol & 0xFFFF;
        symbol = room.ends[++at];
      }
      slots[i] = (base + i - start) | symbol >> 16 << 12 | ((symbol & 0xFFFF) - start - 1) << 20;
    }
    room.slots[base / 4] = make_uint4(slots[0], slots[1], slots[2], slots[3]);
  }
  __syncthreads();
}

// The words of a stream, taken from its end. Those that come next lie in the warp's row of the room, the last at its
// end; `ahead` holds the batch below them, if `batches` says that there is one. A tile takes kMost bytes at most.
template <u32 kMost>
struct Words {
  static constexpr u32 kKept = (kMost + kBatchBytes - 1) / kBatchBytes;
  const u8* words;
  u32 bytes, batches;    // of the words, padding included; not yet in the row
  u32 row, end;          // where the warp's row starts and what is left in it ends, in bytes of the room
  uint4 ahead;

  __device__ __forceinline__ void start(const u8* from, u32 num_bytes, Room& room) {
    words = from;
    bytes = round_up_16(num_bytes);
    batches = (num_bytes + kBatchBytes - 1) / kBatchBytes;
    row = (u32)sizeof(room.below) + threadIdx.x / kLanes * kRowBytes;
    end = row - (batches * kBatchBytes - num_bytes);   // a batch that is not full counts as full, so far
    ahead = make_uint4(0, 0, 0, 0);
    fetch();
    fill(room);
  }
  __device__ __forceinline__ void fetch() {
    const u32 at = (batches - 1) * kBatchBytes + lane_of_thread() * kLaneBytes;
    if (batches > 0 && at < bytes) ahead = *reinterpret_cast<const uint4*>(words + at);
  }
  // Moves what is left up and puts batches below it, until there is enough for a tile.
  __device__ void fill(Room& room) {
    uint4* vectors = room.rows[threadIdx.x / kLanes] + lane_of_thread();
#pragma unroll 1
    while (batches > 0 && end < row + kMost) {
      uint4 kept[kKept];
      __syncwarp();   // all have read what they take
#pragma unroll
      for (u32 i = 0; i < kKept; ++i) kept[i] = vectors[i * kLanes];
#pragma unroll
      for (u32 i = 0; i < kKept; ++i) vectors[(i + 1) * kLanes] = kept[i];
      vectors[0] = ahead;
      __syncwarp();
      end += kBatchBytes;
      --batches;
      fetch();
    }
  }
  // Makes sure of the next tile's words. False where the last tile took some that were not there.
  __device__ __forceinline__ bool require(Room& room) {
    if (end >= row + kMost) return true;
    if (end < row) return false;
    fill(room);
    return true;
  }
  __device__ __forceinline__ bool are_all_taken() const { return batches == 0 && end == row; }
};

// Decodes one symbol of a lane; returns its slot. `end`: see Words.
__device__ __forceinline__ u32 get(u32& x, bool active, u32& end, const Room& room, u32 not_below) {
  const u32 slot = reinterpret_cast<const u32*>(room.slots)[x % kSum];
  const u32 next = (slot >> 20) * (x >> kLog2Sum) + ((x >> kLog2Sum) + slot % kSum);
  const bool takes = active && next < kLowestState;
  const u32 mask = __ballot_sync(kAll, takes);
  const u32 word = *reinterpret_cast<const u16*>(reinterpret_cast<const u8*>(&room) + (end - 2 * __popc(mask & not_below)));
  end -= 2 * __popc(mask);
  if (active) x = takes ? next << 16 | word : next;
  return slot;
}

template <class C>
__device__ bool decode_stream(const Job& job, Room& room) {
  constexpr u32 k = C::kUnits;
  const u32 lane = lane_of_thread(), not_below = ~lanes_below(), whole = job.bytes / kTileBytes, c = job.num_coded;
  u32 x = reinterpret_cast<const u32*>(job.stream)[lane], slot[k];
  Words<2 * kLanes * k> words;
  words.start(job.stream + kStateBytes, job.stream_bytes - kStateBytes, room);
  const Places<C> places(job);
  Planes<C> planes;
  load_planes<C>(planes, places, c - 1);
  u32 t = (job.bytes + kTileBytes - 1) / kTileBytes;
  const u32 plain_tiles = job.mapped ? 0 : whole;   // with no special case but that of the first
#pragma unroll 1
  for (u32 j = c; j-- > 0;) {
    if (!words.require(room)) return false;
    if (j > 0 && j < plain_tiles) {
#pragma unroll
      for (u32 i = k; i-- > 0;) slot[i] = get(x, true, words.end, room, not_below);
      *reinterpret_cast<uint4*>(places.out + (u64)j * kTileBytes) = join_tile<C>(slot, planes, job.sign);
    } else {
      t = job.mapped ? coded_tile_before(t, job.map) : j;
      const u32 exist = existing_of_tile(job, t);
#pragma unroll
      for (u32 i = k; i-- > 0;) slot[i] = get(x, i < exist / C::kUnitBytes, words.end, room, not_below);
      if (j == 0) set_carried<C>(planes, x);
      store_vector(places.out + t * kTileBytes, exist, join_tile<C>(slot, planes, job.sign));
    }
    load_planes<C>(planes, places, j > 0 ? j - 1 : 0);   // one tile ahead
  }
  const bool ended = C::kBits != 0 ? x >> 16 == 1 : x == kLowestState;
  return words.are_all_taken() && __all_sync(kAll, ended);
}

template <class C> __device__ void decode_plain(const Job& job) {
  constexpr u32 k = C::kUnits;
  const u32 lane = lane_of_thread(), c = job.num_coded;
  const u8* symbols = job.stream + (C::kBits ? kCarriedBytes : 0);
  u32 t = (job.bytes + kTileBytes - 1) / kTileBytes, slot[k];   // with nothing but the symbol
  const Places<C> places(job);
  Planes<C> planes;
#pragma unroll 1
  for (u32 j = c; j-- > 0;) {
    t = job.mapped ? coded_tile_before(t, job.map) : t - 1;
    load_planes<C>(planes, places, j);
    if (j == 0 && C::kBits != 0) set_carried<C>(planes, reinterpret_cast<const u16*>(job.stream)[lane]);
    const u8* mine = symbols + (j * kLanes + lane) * k;
    if constexpr (k == 16) {
      const uint4 q = *reinterpret_cast<const uint4*>(mine);
      const u32 octets[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
      for (u32 i = 0; i < k; ++i) slot[i] = (octets[i / 4] >> (8 * (i % 4)) & 255) << 12;
    } else {
#pragma unroll
      for (u32 i = 0; i < k; ++i) slot[i] = (u32)mine[i] << 12;
    }
    store_vector(places.out + t * kTileBytes, existing_of_tile(job, t), join_tile<C>(slot, planes, job.sign));
  }
}

// Segments with the flag E. What a lane has of a tile, once its raw fields are being loaded.
template <class C> struct Sparse {
  typename C::Value field[C::kUnits];
  u32 symbols[(C::kUnits + 3) / 4], t;   // four symbols a word; the tile
  u32 full;                              // bit i: unit i has a field
};

template <class C> __device__ __forceinline__ void store_sparse(const Job& job, const Sparse<C>& tile) {
  u32 words[4] = {0, 0, 0, 0};
#pragma unroll
  for (u32 i = 0; i < C::kUnits; ++i) {
    const typename C::Value joined = join<C>(tile.symbols[i / 4] >> (8 * (i % 4)) & 255, tile.field[i], 0);
    const typename C::Value v = tile.full >> i & 1 ? joined : 0;
    if constexpr (C::kUnitBytes == 2) words[i / 2] |= v << (16 * (i % 2));
    if constexpr (C::kUnitBytes == 4) words[i] = v;
    if constexpr (C::kUnitBytes == 8) words[2 * i] = (u32)v, words[2 * i + 1] = (u32)(v >> 32);
  }
  store_vector(job.out + tile.t * kTileBytes + lane_of_thread() * kLaneBytes, existing_of_tile(job, tile.t),
               make_uint4(words[0], words[1], words[2], words[3]));
}

// Loads the fields of a tile; this lane's first one is number `first` of the segment.
template <class C>
__device__ __forceinline__ void load_sparse(const Job& job, u32 first, Sparse<C>& tile) {
#pragma unroll
  for (u32 i = 0; i < C::kUnits; ++i)
    if (tile.full >> i & 1) tile.field[i] = load_field<C>(job.area, job.num_fields, first++);
}

template <class C>
__device__ bool decode_sparse(const Job& job, Room& room) {
  constexpr u32 k = C::kUnits;
  const u32 lane = lane_of_thread(), not_below = ~lanes_below(), c = job.num_coded;
  u32 x = kLowestState, left = job.num_fields, t = (job.bytes + kTileBytes - 1) / kTileBytes;
  Words<2 * kLanes * k> words = {};
  if (!job.plain) {
    x = reinterpret_cast<const u32*>(job.stream)[lane];
    words.start(job.stream + kStateBytes, job.stream_bytes - kStateBytes, room);
  }
  Sparse<C> before = {};   // the tile decoded before, while its fields come
#pragma unroll 1
  for (u32 j = c; j-- > 0;) {
    Sparse<C> tile = {};
    tile.t = t = job.mapped ? coded_tile_before(t, job.map) : t - 1;
    const u32 units = existing_of_tile(job, t) / C::kUnitBytes;
    if (job.plain) {
      const u8* mine = job.stream + (j * kLanes + lane) * k;
#pragma unroll
      for (u32 i = 0; i < k; ++i) tile.symbols[i / 4] |= (u32)mine[i] << (8 * (i % 4));
    } else {
      if (!words.require(room)) return false;
#pragma unroll
      for (u32 i = k; i-- > 0;)
        tile.symbols[i / 4] |= (get(x, i < units, words.end, room, not_below) >> 12 & 255) << (8 * (i % 4));
    }
#pragma unroll
    for (u32 i = 0; i < k; ++i)
      tile.full |= (i < units && (tile.symbols[i / 4] >> (8 * (i % 4)) & 255) != kEmptySymbol ? 1u : 0u) << i;
    u32 total;
    const u32 first = sum_before_lane(__popc(tile.full), total);
    if (total > left) return false;   // so no field is read that there is not
    left -= total;
    load_sparse<C>(job, left + first, tile);
    if (j + 1 < c) store_sparse<C>(job, before);
    before = tile;
  }
  store_sparse<C>(job, before);
  return left == 0 && (job.plain || (words.are_all_taken() && __all_sync(kAll, x == kLowestState)));
}

template <class C> __device__ bool decode_segment(const Job& job, Room& room) {
  if (job.mapped) fill_tiles(job, job.map, make_uint2(0, 0));
  if (!job.plain) return decode_stream<C>(job, room);
  decode_plain<C>(job);
  return true;
}

template <u32 kUnitBytes> __device__ bool decode_by_flags(const Job& job, u32 flags, Room& room) {
  if constexpr (kUnitBytes >= 2)
    if (job.num_fields != 0) {
      if (job.mapped) fill_tiles(job, job.map, make_uint2(0, 0));
      if constexpr (kUnitBytes == 4)
        if (flags == 4) return decode_sparse<Cut<4, 4>>(job, room);
      return decode_sparse<Cut<kUnitBytes, 0>>(job, room);
    }
  if constexpr (kUnitBytes >= 2)
    if (flags == 1) return decode_segment<Cut<kUnitBytes, 1>>(job, room);
  if constexpr (kUnitBytes >= 4) {
    if (flags == 4) return decode_segment<Cut<kUnitBytes, 4>>(job, room);
    if (flags == 5) return decode_segment<Cut<kUnitBytes, 5>>(job, room);
  }
  if constexpr (kUnitBytes == 8) {
    if (flags == 2) return decode_segment<Cut<kUnitBytes, 2>>(job, room);
    if (flags == 3) return decode_segment<Cut<kUnitBytes, 3>>(job, room);
    if (flags == 6) return decode_segment<Cut<kUnitBytes, 6>>(job, room);
    if (flags == 7) return decode_segment<Cut<kUnitBytes, 7>>(job, room);
  }
  return decode_segment<Cut<kUnitBytes, 0>>(job, room);
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
  __shared__ Room room;
  const u32 lane = lane_of_thread(), warp = threadIdx.x / kLanes, s = blockIdx.x * kWarps + warp;
  Job job = {};
  u32 flags = 0, table = kAll;   // what is still wanted: kNoTable for a plain segment
  bool good = true;
  if (s < num_segments) {
    const u64 entry = entries[s], start = (u64)s * segment_tiles * kTileBytes;
    const u32 low = (u32)entry, kind = low >> 20 & 3;
    job.out = out + start;
    job.bytes = (u32)smaller((u64)segment_tiles * kTileBytes, raw_bytes - start);
    job.num_fields = (u32)(entry >> 43) & 0x1FFFF;
    job.area = body + raw_offsets[s] - (job.num_fields ? 0 : kCarriedBytes);
    job.stream = body + stream_offsets[s];
    job.stream_bytes = low & 0xFFFFF;
    job.num_coded = (u32)(entry >> 34) & 511;
    job.sign = low >> 23 & 1;
    job.mapped = low >> 26 & 1;
    job.plain = kind == kPlain;
    flags = (low >> 22 & 1) * kOneSign | (low >> 24 & 1) * kNoHigh | (low >> 25 & 1) * kShort;
    if (kind <= kConstant) {
      const uint2 pattern = kind == kZero ? make_uint2(0, 0) : *reinterpret_cast<const uint2*>(job.stream);
      fill_tiles(job, 0, pattern);
    } else {
      if (job.mapped) good = take_map(job);
      if (good) table = job.plain ? kNoTable : ((u32)(entry >> 28) & 63) * 2 + (low >> 27 & 1);
    }
  }
  for (;;) {   // nearly always once: the segments of a thread block have one table
    if (threadIdx.x == 0) room.wanted = kAll;
    __syncthreads();
    if (lane == 0 && table != kAll) atomicMin(&room.wanted, table);
    __syncthreads();
    const u32 now = room.wanted;
    if (now == kAll) break;
    if (now != kNoTable) make_slots(frequencies + now * kSymbols, room);
    if (table == now) {
      good = decode_by_flags<kUnitBytes>(job, flags, room);
      table = kAll;
    }
    __syncthreads();
  }
  if (!good && lane == 0) atomicAdd(failures, 1ull);
}

#define DEFINE_DECODER(SIZE)                                                                                        \
  extern "C" __global__ void __launch_bounds__(kThreads, SIZE == 8 ? 3 : 4) decode_segments_##SIZE(                 \
      const u8* body, u8* out, u64 raw_bytes, u32 segment_tiles, u32 num_segments, const u64* entries,              \
      const u64* raw_offsets, const u64* stream_offsets, const u16* frequencies, u64* failures) {                   \
    decode_segments<SIZE>(body, out, raw_bytes, segment_tiles, num_segments, entries, raw_offsets, stream_offsets,  \
                          frequencies, failures);                                                                   \
  }

DEFINE_DECODER(1)
DEFINE_DECODER(2)
DEFINE_DECODER(4)
DEFINE_DECODER(8)
