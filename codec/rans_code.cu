// How one warp codes one segment: the stream into a slot of its own, the raw fields straight to their place in the body.
constexpr u32 kBatchBytes = kLanes * kLaneBytes;   // of a stream, stored together
constexpr u32 kRowBytes = 3 * kBatchBytes;           // of a warp: less than a batch, and what a tile adds, 1024 bytes

// What a thread block keeps in shared memory.
struct Room {
  uint4 entries[2][kSymbols];   // of a table and of its wide one
  uint4 rows[kWarps][kRowBytes / sizeof(uint4)];
  u32 sums[kWarps];
};

struct Segment {
  const u8* raw;
  u32 bytes, num_coded, map;   // lane w < 8 holds word w of the map
  bool mapped;
  u32 num_fields;              // with the flag E, else 0
  u8* area;                    // less the 64 bytes that the stream carries, if it does
};

template <class C> __device__ __forceinline__ uint4 load_lane(const Segment& segment, u32 t) {
  // An F64 of 0x37F0… has symbol and raw field 0, as a unit that does not exist is to have.
  const u32 high = C::kUnitBytes == 8 ? 0x37F00000u : 0, at = t * kTileBytes + lane_of_thread() * kLaneBytes;
  if (t < segment.bytes / kTileBytes) return *reinterpret_cast<const uint4*>(segment.raw + at);
  return load_vector(segment.raw + at, existing(at, segment.bytes), make_uint4(0, high, 0, high));
}

// The words of a stream. The first `stored` bytes are in it; the others in the warp's row of the room, up to `end`. A tile
// adds kMost bytes at most.
template <u32 kMost>
struct Words {
  static constexpr u32 kKept = (kMost + kBatchBytes - 1) / kBatchBytes;
  u8* stream;
  u32 stored, row, end;   // the latter two in bytes of the room

  __device__ explicit Words(u8* to)
      : stream(to), stored(0), row((u32)sizeof(uint4) * 2 * kSymbols + threadIdx.x / kLanes * kRowBytes), end(row) {}
  __device__ __forceinline__ u32 num_bytes() const { return stored + end - row; }
  __device__ __forceinline__ bool has_batch() const { return end >= row + kBatchBytes; }

  // Puts what the row has of whole batches into the stream.
  __device__ void store_batches(Room& room) {
    const u32 lane = lane_of_thread();
    uint4* vectors = room.rows[threadIdx.x / kLanes] + lane;
#pragma unroll 1
    while (has_batch()) {
      uint4 kept[kKept];
      __syncwarp();   // all have added what they emit
      reinterpret_cast<uint4*>(stream + stored)[lane] = vectors[0];
#pragma unroll
      for (u32 i = 0; i < kKept; ++i) kept[i] = vectors[(i + 1) * kLanes];
      __syncwarp();
#pragma unroll
      for (u32 i = 0; i < kKept; ++i) vectors[i * kLanes] = kept[i];
      __syncwarp();
      stored += kBatchBytes;
      end -= kBatchBytes;
    }
  }
  // Puts all into the stream, and something behind it up to a multiple of 16.
  __device__ void store_all(Room& room) {
    store_batches(room);
    __syncwarp();
    const u32 lane = lane_of_thread();
    if (lane * kLaneBytes < end - row)
      reinterpret_cast<uint4*>(stream + stored)[lane] = room.rows[threadIdx.x / kLanes][lane];
  }
};

// Codes one symbol of a lane: returns its next state. `end`: see Words.
__device__ __forceinline__ u32 put(u32 x, uint4 e, bool active, Room& room, u32& end, u32 below) {
  const bool emits = active && x > e.x;
  const u32 mask = __ballot_sync(kAll, emits);
  u8* at = reinterpret_cast<u8*>(&room) + (end + 2 * __popc(mask & below));
  if (emits) {
    *reinterpret_cast<u16*>(at) = (u16)x;
    x >>= 16;
  }
  end += 2 * __popc(mask);
  const u32 quotient = __funnelshift_r(__umulhi(x + (e.w >> 31), e.y), 0, e.w);   // takes its shift modulo 32
  const u32 next = x + e.z + quotient * __byte_perm(e.w, 0, 0x4421);
  return active ? next : x;
}

template <class C, u32 kLeft, u32 kLowest>
__device__ __forceinline__ void store_planes(const typename C::Value (&value)[C::kUnits], u8* plane, u32 num_coded, u32 j,
                                             u32 skipped) {
  if constexpr (kLeft != 0) {
    constexpr u32 kWidth = widest(kLeft);
    store_bits<kWidth * C::kUnits>(plane + j * (4 * C::kUnits * kWidth), pack_plane<C, kWidth, kLowest>(value),
                                   skipped);
    u8* next = plane + plane_bytes<C::kUnits>(kWidth, num_coded);
    if constexpr (4 * C::kUnits * kWidth % 16 != 0)   // half a vector a tile
      if (num_coded % 2 && j == num_coded - 1 && lane_of_thread() < 8) next[-8 + (int)lane_of_thread()] = 0;
    store_planes<C, kLeft - kWidth, kLowest + kWidth>(value, next, num_coded, j, 0);
  }
}

// Four bytes of mantissas with the signs of the bytes above them.
__device__ __forceinline__ u32 with_signs(u32 mantissas, u32 above) {
  return ((mantissas ^ above) & 0x7F7F7F7Fu) ^ above;
}

// All planes of a tile.
template <class C>
__device__ __forceinline__ void store_fields(uint4 q, const typename C::Value (&value)[C::kUnits], u8* area,
                                             u32 num_coded, u32 j, u32 skipped) {
  if constexpr (C::kUnitBytes == 2 && C::kBits == 8) {
    const u32 low = with_signs(__byte_perm(q.x, q.y, 0x6420), __byte_perm(q.x, q.y, 0x7531));
    const u32 high = with_signs(__byte_perm(q.z, q.w, 0x6420), __byte_perm(q.z, q.w, 0x7531));
    store_bits<64>(area + j * 256, (u64)high << 32 | low, skipped);
  } else if constexpr (C::kUnitBytes == 4 && C::kBits == 24) {
    const u32 tops = __byte_perm(q.x, q.y, 0x7632), more_tops = __byte_perm(q.z, q.w, 0x7632);
    const u32 low = __byte_perm(q.x, q.y, 0x5410), high = __byte_perm(q.z, q.w, 0x5410);
    store_bits<64>(area + j * 256, (u64)high << 32 | low, skipped);
    store_bits<32>(area + 256 * num_coded + j * 128,
                   with_signs(__byte_perm(tops, more_tops, 0x6420), __byte_perm(tops, more_tops, 0x7531)), 0);
  } else {
    store_planes<C, C::kBits, 0>(value, area, num_coded, j, skipped);
  }
}

template <class C> __device__ __forceinline__ u32 carried_by(const typename C::Value (&value)[C::kUnits]) {
  if constexpr (C::kBits == 0) return 0;
  else {
    constexpr u32 kWidth = widest(C::kBits);
    return carried_of<kWidth * C::kUnits>(pack_plane<C, kWidth, 0>(value));
  }
}

// The coded tile behind tile t, which is number j of them; there must be one.
__device__ __forceinline__ u32 next_tile(const Segment& segment, u32 j, u32 t) {
  return segment.mapped ? coded_tile_from(t + 1, segment.map) : j + 1;
}

// How many units of tile t this lane has.
template <class C> __device__ __forceinline__ u32 existing_units(const Segment& segment, u32 t) {
  return existing(t * kTileBytes + lane_of_thread() * kLaneBytes, segment.bytes) / C::kUnitBytes;
}

template <class C>
__device__ __forceinline__ uint4 entry_of(typename C::Value value, const Room& room, u32 table_at) {
  return *reinterpret_cast<const uint4*>(reinterpret_cast<const u8*>(room.entries) + (symbol_of<C>(value) << 4 | table_at));
}

// Codes a segment into `stream`. Returns how many words it wrote, or kAll where the table lacks a symbol of the segment,
// or kAll - 1 where the stream would not be shorter than a plain one.
template <class C>
__device__ u32 code_stream(const Segment& segment, Room& room, u32 is_wide, u8* stream, u32 plain_bytes, u32& carried) {
  constexpr u32 k = C::kUnits;
  const u32 below = lanes_below(), table_at = is_wide * (u32)sizeof(room.entries[0]), c = segment.num_coded;
  const u32 plain_tiles = segment.mapped ? 0 : segment.bytes / kTileBytes;   // with no special case but that of the first
  const u8* raw = segment.raw + lane_of_thread() * kLaneBytes;
  Words<2 * kLanes * k> words(stream + kStateBytes);
  u32 x = kLowestState, lacks = 0, j = 0, t = segment.mapped ? coded_tile_from(0, segment.map) : 0;
  uint4 ahead = load_lane<C>(segment, t);
#pragma unroll 1
  for (; j < c; ++j) {
    if (words.has_batch()) {
      if (kStateBytes + words.num_bytes() >= plain_bytes) break;
      words.store_batches(room);
    }
    const uint4 q = ahead;
    typename C::Value value[k];
    values_of<C>(q, value);
    if (j > 0 && j + 1 < plain_tiles) {
      ahead = *reinterpret_cast<const uint4*>(raw + (u64)(j + 1) * kTileBytes);
      store_fields<C>(q, value, segment.area, c, j, 0);
      uint4 next = entry_of<C>(value[0], room, table_at);
#pragma unroll
      for (u32 i = 0; i < k; ++i) {
        const uint4 e = next;
        if (i + 1 < k) next = entry_of<C>(value[i + 1], room, table_at);   // before the compiler has to wait for a store
        lacks |= e.w;
        x = put(x, e, true, room, words.end, below);
      }
    } else {
      const u32 units = existing_units<C>(segment, segment.mapped ? t : j);
      if (j + 1 < c) ahead = load_lane<C>(segment, t = next_tile(segment, j, t));
      if (j == 0) x += carried = carried_by<C>(value);
      store_fields<C>(q, value, segment.area, c, j, j == 0 ? kCarriedBytes : 0);
#pragma unroll
      for (u32 i = 0; i < k; ++i) {
        const uint4 e = entry_of<C>(value[i], room, table_at);
        if (i < units) lacks |= e.w;
        x = put(x, e, i < units, room, words.end, below);
      }
    }
  }
  const bool fits = kStateBytes + words.num_bytes() < plain_bytes;
#pragma unroll 1
  for (; j < c; ++j) {   // whether the table has all symbols must still be known
    const u32 units = existing_units<C>(segment, segment.mapped ? t : j);
    typename C::Value value[k];
    values_of<C>(ahead, value);
#pragma unroll
    for (u32 i = 0; i < k; ++i)
      if (i < units) lacks |= entry_of<C>(value[i], room, table_at).w;
    if (j + 1 < c) ahead = load_lane<C>(segment, t = next_tile(segment, j, t));
  }
  if (__any_sync(kAll, lacks >> 30 & 1)) return kAll;
  if (!fits) return kAll - 1;
  words.store_all(room);
  reinterpret_cast<u32*>(stream)[lane_of_thread()] = x;
  return words.num_bytes() / 2;
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
    store_fields<C>(q, value, segment.area, c, j, j == 0 ? kCarriedBytes : 0);
    if (j + 1 < c) t = next_tile(segment, j, t);
  }
}

// Segments with the flag E: a unit of 0 has the symbol kEmptySymbol and no raw field, and the stream carries nothing.

template <class C> __device__ __forceinline__ u32 sparse_symbol_of(typename C::Value v) {
  return v == 0 ? kEmptySymbol : symbol_of<C>(v);
}

// Stores the raw fields of a tile, of which this lane has `units` units, behind the first `stored`; returns how many there
// are then.
template <class C>
__device__ __forceinline__ u32 store_sparse_fields(const typename C::Value (&value)[C::kUnits], const Segment& segment,
                                                   u32 units, u32 stored) {
  u32 mine = 0, total;
#pragma unroll
  for (u32 i = 0; i < C::kUnits; ++i) mine += i < units && value[i] != 0;
  u32 index = stored + sum_before_lane(mine, total);
#pragma unroll
  for (u32 i = 0; i < C::kUnits; ++i)
    if (i < units && value[i] != 0) store_field<C>(field_of<C>(value[i]), segment.area, segment.num_fields, index++);
  return stored + total;
}

// Writes what stands between the planes: zero bytes up to multiples of 16.
template <class C, u32 kLeft = C::kBits>
__device__ __forceinline__ void pad_sparse_planes(u8* plane, u32 num_fields) {
  if constexpr (kLeft != 0) {
    constexpr u32 kWidth = widest(kLeft);
    const u32 bytes = num_fields * (kWidth / 8), lane = lane_of_thread();
    if (lane < sparse_plane_bytes(kWidth, num_fields) - bytes) plane[bytes + lane] = 0;
    pad_sparse_planes<C, kLeft - kWidth>(plane + sparse_plane_bytes(kWidth, num_fields), num_fields);
  }
}

// Does what code_stream does.
template <class C>
__device__ u32 code_sparse_stream(const Segment& segment, Room& room, u32 is_wide, u8* stream, u32 plain_bytes) {
  constexpr u32 k = C::kUnits;
  const u32 below = lanes_below(), table_at = is_wide * (u32)sizeof(room.entries[0]), c = segment.num_coded;
  Words<2 * kLanes * k> words(stream + kStateBytes);
  u32 x = kLowestState, lacks = 0, stored = 0, t = segment.mapped ? coded_tile_from(0, segment.map) : 0;
  bool fits = true;
  uint4 ahead = load_lane<C>(segment, t);
#pragma unroll 1
  for (u32 j = 0; j < c; ++j) {
    if (words.has_batch()) {
      fits = fits && kStateBytes + words.num_bytes() < plain_bytes;
      words.store_batches(room);
    }
    typename C::Value value[k];
    values_of<C>(ahead, value);
    const u32 units = existing_units<C>(segment, t);
    if (j + 1 < c) ahead = load_lane<C>(segment, t = next_tile(segment, j, t));
    stored = store_sparse_fields<C>(value, segment, units, stored);
#pragma unroll
    for (u32 i = 0; i < k; ++i) {
      const u32 at = sparse_symbol_of<C>(value[i]) << 4 | table_at;
      const uint4 e = *reinterpret_cast<const uint4*>(reinterpret_cast<const u8*>(room.entries) + at);
      if (i < units) lacks |= e.w;
      if (fits) x = put(x, e, i < units, room, words.end, below);   // the same for all lanes; `lacks` must still be known
    }
  }
  pad_sparse_planes<C>(segment.area, segment.num_fields);
  if (__any_sync(kAll, lacks >> 30 & 1)) return kAll;
  if (!fits || kStateBytes + words.num_bytes() >= plain_bytes) return kAll - 1;
  words.store_all(room);
  reinterpret_cast<u32*>(stream)[lane_of_thread()] = x;
  return words.num_bytes() / 2;
}

// Only the symbols: the raw area is there already.
template <class C> __device__ void write_sparse_plain(const Segment& segment, u8* stream) {
  u32 t = segment.mapped ? coded_tile_from(0, segment.map) : 0;
  for (u32 j = 0; j < segment.num_coded; ++j) {
    typename C::Value value[C::kUnits];
    values_of<C>(load_lane<C>(segment, t), value);
    const u32 units = existing_units<C>(segment, t);
    u64 symbols = 0;
#pragma unroll
    for (u32 i = 0; i < C::kUnits; ++i)
      if (i < units) symbols |= (u64)sparse_symbol_of<C>(value[i]) << (8 * i);
    store_bits<8 * C::kUnits>(stream + j * kLanes * C::kUnits, symbols, 0);
    if (j + 1 < segment.num_coded) t = next_tile(segment, j, t);
  }
}

// Returns the directory entry.
template <class C, bool kSparse = false>
__device__ u64 code_segment(const Segment& segment, Room& room, u32 table, u8* slot, u32 info) {
  const u32 lane = lane_of_thread(), flags = info >> kFlagShift, c = segment.num_coded;
  const u32 plain_bytes = (C::kBits && !kSparse ? kCarriedBytes : 0) + kLanes * C::kUnits * c;
  u8* stream = slot;
  if (segment.mapped) {
    if (lane < 8) reinterpret_cast<u32*>(slot)[lane] = segment.map;
    stream += kMapBytes;
  }
  u32 carried = 0, is_wide = 0, num_words;
#pragma unroll 1   // for one copy of the code
  for (;;) {
    if constexpr (kSparse) num_words = code_sparse_stream<C>(segment, room, is_wide, stream, plain_bytes);
    else num_words = code_stream<C>(segment, room, is_wide, stream, plain_bytes, carried);
    if (num_words != kAll) break;
    is_wide = 1;   // a wide table has all symbols
    __syncwarp();  // what one lane wrote, another may write again
  }
  __syncwarp();
  u32 kind = kCoded, stream_bytes = kStateBytes + 2 * num_words;
  if (num_words >= kAll - 1) {
    if constexpr (kSparse) write_sparse_plain<C>(segment, stream);
    else write_plain<C>(segment, stream, carried);
    kind = kPlain, stream_bytes = plain_bytes, table = is_wide = 0;
    __syncwarp();
  }
  stream_bytes += segment.mapped ? kMapBytes : 0;
  if (lane < 16 && stream_bytes + lane < round_up_16(stream_bytes)) slot[stream_bytes + lane] = 0;
  const u32 low = stream_bytes | kind << 20 | (flags & kOneSign ? 1u : 0u) << 22 | (info >> kSignShift & 1) << 23 |
                  (flags & kNoHigh ? 1u : 0u) << 24 | (flags & kShort ? 1u : 0u) << 25 |
                  (segment.mapped ? 1u : 0u) << 26 | is_wide << 27 | table << 28;
  const u32 high = table >> 4 | c << 2 | segment.num_fields << 11 | (kSparse ? 1u << 28 : 0);
  return (u64)high << 32 | low;
}

template <u32 kUnitBytes>
__device__ u64 code_by_flags(const Segment& segment, Room& room, u32 table, u8* slot, u32 info) {
  const u32 flags = info >> kFlagShift & 7;
  if constexpr (kUnitBytes >= 2) {
    if (is_sparse(info)) {
      if constexpr (kUnitBytes == 4)
        if (flags == 4) return code_segment<Cut<4, 4>, true>(segment, room, table, slot, info);
      return code_segment<Cut<kUnitBytes, 0>, true>(segment, room, table, slot, info);
    }
    if (flags == 1) return code_segment<Cut<kUnitBytes, 1>>(segment, room, table, slot, info);
  }
  if constexpr (kUnitBytes >= 4) {
    if (flags == 4) return code_segment<Cut<kUnitBytes, 4>>(segment, room, table, slot, info);
    if (flags == 5) return code_segment<Cut<kUnitBytes, 5>>(segment, room, table, slot, info);
  }
  if constexpr (kUnitBytes == 8) {
    if (flags == 2) return code_segment<Cut<kUnitBytes, 2>>(segment, room, table, slot, info);
    if (flags == 3) return code_segment<Cut<kUnitBytes, 3>>(segment, room, table, slot, info);
    if (flags == 6) return code_segment<Cut<kUnitBytes, 6>>(segment, room, table, slot, info);
    if (flags == 7) return code_segment<Cut<kUnitBytes, 7>>(segment, room, table, slot, info);
  }
  return code_segment<Cut<kUnitBytes, 0>>(segment, room, table, slot, info);
}
