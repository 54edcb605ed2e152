// The rans encoder proper: codes each segment by one warp, then gathers the streams.

constexpr u32 kPreambleBytes = 32;
constexpr u32 kEnd = 0, kBodyBytes = 1, kRefused = 2;   // words of a report: see device_report.py

struct Tables {
  uint4 entries[2][kSymbols];   // the second is the wide one
};

struct Segment {
  const u8* raw;
  u32 bytes, num_coded, map;   // lane w < 8 holds word w of the map
  bool mapped;
  u8* area;                    // less the 64 bytes that the stream carries
};

template <class C> __device__ __forceinline__ uint4 load_lane(const Segment& segment, u32 t) {
  // An F64 of 0x37F0… has symbol and raw field 0, as a unit that does not exist is to have.
  const u32 high = C::kUnitBytes == 8 ? 0x37F00000u : 0, at = t * kTileBytes + lane_of_thread() * kLaneBytes;
  if (t < segment.bytes / kTileBytes) return *reinterpret_cast<const uint4*>(segment.raw + at);
  return load_vector(segment.raw + at, existing(at, segment.bytes), make_uint4(0, high, 0, high));
}

// Codes one symbol of a lane: returns its next state, and counts the words of the warp.
__device__ __forceinline__ u32 put(u32 x, uint4 e, bool active, u16* words, u32& num_words, u32 below) {
  const bool emits = active && x > e.x;
  const u32 mask = __ballot_sync(kAll, emits);
  u16* at = words + (num_words + __popc(mask & below));
  if (emits) *at = (u16)x;
  x = emits ? x >> 16 : x;
  num_words += __popc(mask);
  const u32 quotient = __funnelshift_r(__umulhi(x + (e.w >> 31), e.y), 0, e.w);   // takes its shift modulo 32
  const u32 next = x + e.z + quotient * __byte_perm(e.w, 0, 0x4421);
  return active ? next : x;
}

template <class C, u32 kLeft, u32 kLowest>
__device__ __forceinline__ void store_planes(const typename C::Value (&value)[C::kUnits], u8* plane, u32 num_coded, u32 j) {
  if constexpr (kLeft != 0) {
    constexpr u32 kWidth = widest(kLeft);
    store_bits<kWidth * C::kUnits>(plane + j * (4 * C::kUnits * kWidth), pack_plane<C, kWidth, kLowest>(value),
                                   kLowest == 0 && j == 0 ? kCarriedBytes : 0);
    u8* next = plane + plane_bytes<C::kUnits>(kWidth, num_coded);
    if constexpr (4 * C::kUnits * kWidth % 16 != 0)   // half a vector a tile
      if (num_coded % 2 && j == num_coded - 1 && lane_of_thread() < 8) next[-8 + (int)lane_of_thread()] = 0;
    store_planes<C, kLeft - kWidth, kLowest + kWidth>(value, next, num_coded, j);
  }
}

// All planes of a tile.
template <class C>
__device__ __forceinline__ void store_fields(uint4 q, const typename C::Value (&value)[C::kUnits], u8* area,
                                             u32 num_coded, u32 j) {
  const u32 skipped = j == 0 ? kCarriedBytes : 0;
  if constexpr (C::kUnitBytes == 2 && C::kBits == 8) {
    constexpr u32 kSigns = 0x00800080;
    const u32 low = __byte_perm(sign_down(q.x, kSigns), sign_down(q.y, kSigns), 0x6420);
    const u32 high = __byte_perm(sign_down(q.z, kSigns), sign_down(q.w, kSigns), 0x6420);
    store_bits<64>(area + j * 256, (u64)high << 32 | low, skipped);
  } else if constexpr (C::kUnitBytes == 4 && C::kBits == 24) {
    constexpr u32 kSign = 0x00800000;
    const u32 low = __byte_perm(q.x, q.y, 0x5410), high = __byte_perm(q.z, q.w, 0x5410);
    store_bits<64>(area + j * 256, (u64)high << 32 | low, skipped);
    store_bits<32>(area + 256 * num_coded + j * 128,
                   pack_four(sign_down(q.x, kSign), sign_down(q.y, kSign), sign_down(q.z, kSign), sign_down(q.w, kSign), 2),
                   0);
  } else {
    store_planes<C, C::kBits, 0>(value, area, num_coded, j);
  }
}

template <class C> __device__ __forceinline__ u32 carried_by(const typename C::Value (&value)[C::kUnits]) {
  if constexpr (C::kBits == 0) return 0;
  else {
    constexpr u32 kWidth = widest(C::kBits);
    return carried_of<kWidth * C::kUnits>(pack_plane<C, kWidth, 0>(value));
  }
}

// Codes a segment into `stream`. Returns how many words it wrote, or kAll where the table lacks a symbol of the segment,
// or kAll - 1 where the stream would not be shorter than a plain one.
template <class C>
__device__ u32 code_stream(const Segment& segment, const Tables& tables, u32 is_wide, u8* stream, u32 plain_bytes,
                           u32& carried) {
  constexpr u32 k = C::kUnits;
  const u32 below = lanes_below(), table_at = is_wide * (u32)sizeof(tables.entries[0]);
  const u32 lane = lane_of_thread(), whole = segment.bytes / kTileBytes, c = segment.num_coded;
  u16* const words = reinterpret_cast<u16*>(stream + kStateBytes);
  u32 num_words = 0, x = kLowestState, t = segment.mapped ? coded_tile_from(0, segment.map) : 0;
  bool fits = true;
  uint4 ahead = load_lane<C>(segment, t);
  for (u32 j = 0; j < c; ++j) {
    const uint4 q = ahead;
    const bool is_whole = t < whole;
    if (j + 1 < c) {
      t = segment.mapped ? coded_tile_from(t + 1, segment.map) : t + 1;
      ahead = load_lane<C>(segment, t);
    }
    typename C::Value value[k];
    values_of<C>(q, value);
    uint4 e[k];
    u32 lacks = 0;
#pragma unroll
    for (u32 i = 0; i < k; ++i)
      e[i] = *reinterpret_cast<const uint4*>(reinterpret_cast<const u8*>(&tables) + (symbol_of<C>(value[i]) << 4 | table_at));
    u32 active = k;   // units of this lane
    if (!is_whole) {
      active = existing((segment.bytes / kTileBytes) * kTileBytes + lane * kLaneBytes, segment.bytes) / C::kUnitBytes;
#pragma unroll
      for (u32 i = 0; i < k; ++i)
        if (i >= active) e[i].w = 0;
    }
#pragma unroll
    for (u32 i = 0; i < k; ++i) lacks |= e[i].w;
    if (fits) {   // if not, whether the table has all symbols must still be known
      if (j == 0) x += carried = carried_by<C>(value);
      store_fields<C>(q, value, segment.area, c, j);
      if (is_whole) {
#pragma unroll
        for (u32 i = 0; i < k; ++i) x = put(x, e[i], true, words, num_words, below);
      } else {
#pragma unroll
        for (u32 i = 0; i < k; ++i) x = put(x, e[i], i < active, words, num_words, below);
      }
      fits = kStateBytes + 2 * num_words < plain_bytes;
    }
    if (__any_sync(kAll, lacks >> 30 & 1)) return kAll;   // last, for only now all lookups must have come
  }
  reinterpret_cast<u32*>(stream)[lane] = x;
  return fits ? num_words : kAll - 1;
}

// The rest of the raw area is there already, up to where the coder gave up; this writes all of it again.
template <class C> __device__ void write_plain(const Segment& segment, u8* stream, u32 carried) {
  const u32 lane = lane_of_thread(), c = segment.num_coded;
  if (C::kBits != 0) {
    reinterpret_cast<u16*>(stream)[lane] = (u16)carried;
    stream += kCarriedBytes;
  }
  u32 t = segment.mapped ? coded_tile_from(0, segment.map) : 0;
  for (u32 j = 0; j < c; ++j) {
    typename C::Value value[C::kUnits];
    const uint4 q = load_lane<C>(segment, t);
    values_of<C>(q, value);
    u64 low = 0, high = 0;
#pragma unroll
    for (u32 i = 0; i < C::kUnits; ++i) {
      const u64 symbol = symbol_of<C>(value[i]);
      if (i < 8) low |= symbol << (8 * i);
      else high |= symbol << (8 * (i - 8));
    }
    u8* tile = stream + j * kLanes * C::kUnits;
    if constexpr (C::kUnits == 16)
      reinterpret_cast<uint4*>(tile)[lane] = make_uint4((u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32));
    else
      store_bits<8 * (C::kUnits < 16 ? C::kUnits : 8)>(tile, low, 0);
    store_fields<C>(q, value, segment.area, c, j);
    if (j + 1 < c) t = segment.mapped ? coded_tile_from(t + 1, segment.map) : t + 1;
  }
}

// Returns the directory entry.
template <class C>
__device__ u64 code_segment(const Segment& segment, const Tables& tables, u32 table, u8* slot, u32 info) {
  const u32 lane = lane_of_thread(), flags = info >> kFlagShift, c = segment.num_coded;
  const u32 plain_bytes = (C::kBits ? kCarriedBytes : 0) + kLanes * C::kUnits * c;
  u8* stream = slot;
  if (segment.mapped) {
    if (lane < 8) reinterpret_cast<u32*>(slot)[lane] = segment.map;
    stream += kMapBytes;
  }
  u32 carried = 0, is_wide = 0, num_words;
#pragma unroll 1   // for one copy of the code
  while ((num_words = code_stream<C>(segment, tables, is_wide, stream, plain_bytes, carried)) == kAll) {
    is_wide = 1;   // a wide table has all symbols
    __syncwarp();  // what one lane wrote, another may write again
  }
  __syncwarp();
  u32 kind = kCoded, stream_bytes = kStateBytes + 2 * num_words;
  if (num_words >= kAll - 1) {
    write_plain<C>(segment, stream, carried);
    kind = kPlain, stream_bytes = plain_bytes, table = is_wide = 0;
    __syncwarp();
  }
  stream_bytes += segment.mapped ? kMapBytes : 0;
  if (lane < 16 && stream_bytes + lane < round_up_16(stream_bytes)) slot[stream_bytes + lane] = 0;
  const u32 low = stream_bytes | kind << 20 | (flags & kOneSign ? 1u : 0u) << 22 | (info >> kSignShift & 1) << 23 |
                  (flags & kNoHigh ? 1u : 0u) << 24 | (flags & kShort ? 1u : 0u) << 25 |
                  (segment.mapped ? 1u : 0u) << 26 | is_wide << 27 | table << 28;
  return (u64)(table >> 4 | c << 2) << 32 | low;
}

template <u32 kUnitBytes>
__device__ u64 code_by_flags(const Segment& segment, const Tables& tables, u32 table, u8* slot, u32 info) {
  const u32 flags = info >> kFlagShift & 7;
  if constexpr (kUnitBytes >= 2)
    if (flags == 1) return code_segment<Cut<kUnitBytes, 1>>(segment, tables, table, slot, info);
  if constexpr (kUnitBytes >= 4) {
    if (flags == 4) return code_segment<Cut<kUnitBytes, 4>>(segment, tables, table, slot, info);
    if (flags == 5) return code_segment<Cut<kUnitBytes, 5>>(segment, tables, table, slot, info);
  }
  if constexpr (kUnitBytes == 8) {
    if (flags == 2) return code_segment<Cut<kUnitBytes, 2>>(segment, tables, table, slot, info);
    if (flags == 3) return code_segment<Cut<kUnitBytes, 3>>(segment, tables, table, slot, info);
    if (flags == 6) return code_segment<Cut<kUnitBytes, 6>>(segment, tables, table, slot, info);
    if (flags == 7) return code_segment<Cut<kUnitBytes, 7>>(segment, tables, table, slot, info);
  }
  return code_segment<Cut<kUnitBytes, 0>>(segment, tables, table, slot, info);
}

// Bytes of a body up to its raw region. All threads of a block call it together; thread t gets the bytes of the tables
// before table t.
__device__ u32 start_bytes(const u32* packed_bytes, u32 num_tables, u32 num_segments, u32* room, u32& tables_bytes,
                           u32& tables_before) {
  u32 total;
  tables_before = sum_before(threadIdx.x < num_tables ? packed_bytes[threadIdx.x] : 0, room, total);
  tables_bytes = round_up_16(total);
  return kPreambleBytes + tables_bytes + round_up_16(8 * num_segments);
}

template <u32 kUnitBytes>
__device__ void code_segments(const Chunk& chunk, const u32* infos, const u32* maps, const uint4* entries, u32 num_tables,
                              const u32* packed_bytes, const u64* raw_offsets, u8* body, u8* slots, u32 slot_bytes,
                              u64* directory, u32* stream_bytes, u32* block_streams) {
  __shared__ Tables tables;
  __shared__ u32 room[kWarps];
  u32 unused, unused_too;
  const u32 start = start_bytes(packed_bytes, num_tables, chunk.num_segments, room, unused, unused_too);
  if (start + raw_offsets[chunk.num_segments] >= chunk.raw_bytes) return;   // the chunk does not shrink
  const u32 table = chunk.table(), lane = lane_of_thread(), s = chunk.segment();
  for (u32 i = threadIdx.x; i < 2 * kSymbols; i += kThreads)
    tables.entries[i / kSymbols][i % kSymbols] = entries[2 * kSymbols * table + i];
  __syncthreads();
  u64 entry = 0;
  if (s < chunk.num_segments) {
    const u32 info = infos[s], kind = info % 4;
    Segment segment;
    segment.raw = chunk.raw + chunk.start_of(s);
    segment.bytes = chunk.bytes_of(s);
    segment.num_coded = info >> kTilesShift;
    segment.map = lane < 8 ? maps[8 * s + lane] : 0;
    segment.mapped = info >> kMappedShift & 1;
    segment.area = body + start + raw_offsets[s] - kCarriedBytes;
    u8* slot = slots + (u64)s * slot_bytes;
    if (kind == kConstant) {
      if (lane < 16) slot[lane] = lane < 8 && lane < segment.bytes ? segment.raw[lane] : 0;
      entry = 8 | kConstant << 20;
    } else if (kind == kCoded) {
      entry = code_by_flags<kUnitBytes>(segment, tables, table, slot, info);
    }
  }
  const u32 num_bytes = (u32)entry & 0xFFFFF;
  if (lane == 0) {
    if (s < chunk.num_segments) directory[s] = entry, stream_bytes[s] = num_bytes;
    room[threadIdx.x / kLanes] = round_up_16(num_bytes);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    u32 sum = 0;
    for (u32 w = 0; w < kWarps; ++w) sum += room[w];
    block_streams[blockIdx.x] = sum;
  }
}

// Three thread blocks a multiprocessor where the registers suffice.
#define DEFINE_ENCODER(SIZE)                                                                                     \
  extern "C" __global__ void __launch_bounds__(kThreads, SIZE == 2 || SIZE == 4 ? 3 : 2) code_segments_##SIZE(   \
      const u8* raw, u64 raw_bytes, u32 segment_tiles, u32 num_segments, u32 segments_per_table,                 \
      u32 blocks_per_table, const u32* infos, const u32* maps, const uint4* entries, u32 num_tables,             \
      const u32* packed_bytes, const u64* raw_offsets, u8* body, u8* slots, u32 slot_bytes, u64* directory,      \
      u32* stream_bytes, u32* block_streams) {                                                                   \
    code_segments<SIZE>({raw, raw_bytes, segment_tiles, num_segments, segments_per_table, blocks_per_table},     \
                        infos, maps, entries, num_tables, packed_bytes, raw_offsets, body, slots, slot_bytes,    \
                        directory, stream_bytes, block_streams);                                                 \
  }

DEFINE_ENCODER(1)
DEFINE_ENCODER(2)
DEFINE_ENCODER(4)
DEFINE_ENCODER(8)

__device__ __forceinline__ void copy_stream(uint4* to, const uint4* from, u32 num_vectors) {   // by one warp
  constexpr u32 kInFlight = 6;
  for (u32 base = lane_of_thread(); base < num_vectors; base += kLanes * kInFlight) {
    uint4 held[kInFlight];
#pragma unroll
    for (u32 i = 0; i < kInFlight; ++i)
      if (base + i * kLanes < num_vectors) held[i] = from[base + i * kLanes];
#pragma unroll
    for (u32 i = 0; i < kInFlight; ++i)
      if (base + i * kLanes < num_vectors) to[base + i * kLanes] = held[i];
  }
}

// Puts streams, directory, tables and preamble into the body and ends the report. A warp a segment. Nothing is written
// behind raw_bytes, rounded up to 16; report[kBodyBytes] becomes 0 where the body is not shorter than the chunk.
extern "C" __global__ void __launch_bounds__(kThreads)
gather_streams(u64* report, u8* body, u64 raw_bytes, u32 segment_tiles, u32 num_segments, u32 segments_per_table,
               u32 blocks_per_table, u32 word_type, const u8* packed, const u32* packed_bytes, u32 num_tables, const u64* directory, const u32* stream_bytes,
               const u32* block_streams, const u64* raw_offsets, const u8* slots, u32 slot_bytes) {
  __shared__ u32 room[kWarps], sizes[kWarps];
  __shared__ u64 wide_room[kWarps];
  __shared__ u32 table_at;
  u32 tables_bytes, tables_before;
  const u32 start = start_bytes(packed_bytes, num_tables, num_segments, room, tables_bytes, tables_before);
  if (threadIdx.x == blockIdx.x) table_at = tables_before;   // read behind the next sum
  const u64 region = start + raw_offsets[num_segments];
  const Chunk chunk = {body, raw_bytes, segment_tiles, num_segments, segments_per_table, blocks_per_table};
  const u32 b = blockIdx.x, s = chunk.segment(), lane = lane_of_thread(), warp = threadIdx.x / kLanes;
  const bool is_last = b == gridDim.x - 1;
  if (region >= raw_bytes) {
    if (is_last && threadIdx.x < 3) report[threadIdx.x] = 0;
    return;
  }
  const u32 size = s < num_segments ? round_up_16(stream_bytes[s]) : 0;
  if (lane == 0) sizes[warp] = size;
  u64 at = region + sum_of_block(block_streams, b, wide_room);   // has a barrier
  for (u32 w = 0; w < warp; ++w) at += sizes[w];
  if (s < num_segments) {
    const uint4* from = reinterpret_cast<const uint4*>(slots + (u64)s * slot_bytes);
    if (at + size < raw_bytes) copy_stream(reinterpret_cast<uint4*>(body + at), from, size / 16);
    at += size;
    u64* entries = reinterpret_cast<u64*>(body + kPreambleBytes + tables_bytes);
    if (lane == 0) entries[s] = directory[s];
    if (lane == 0 && s == num_segments - 1 && num_segments % 2) entries[num_segments] = 0;
  }
  if (b < num_tables) {
    const u16* from = reinterpret_cast<const u16*>(packed + kPackedTableBytes * b);
    u16* to = reinterpret_cast<u16*>(body + kPreambleBytes + table_at);
    for (u32 i = threadIdx.x; i < packed_bytes[b] / 2; i += kThreads) to[i] = from[i];
    const u32 end = table_at + packed_bytes[b];
    if (b == num_tables - 1 && threadIdx.x < 16 && end + threadIdx.x < tables_bytes)
      body[kPreambleBytes + end + threadIdx.x] = 0;
  }
  if (s == num_segments - 1 && lane == 0) {
    u32* preamble = reinterpret_cast<u32*>(body);
    preamble[0] = 1 | kLog2Sum << 8 | word_type << 16;
    preamble[1] = segment_tiles | num_tables << 16;
    preamble[2] = num_segments;
    preamble[3] = tables_bytes;
    reinterpret_cast<u64*>(body)[2] = region - start;
    reinterpret_cast<u64*>(body)[3] = at - region;
    report[kEnd] = at;
    report[kBodyBytes] = at < raw_bytes ? at : 0;
    report[kRefused] = 0;
  }
}
