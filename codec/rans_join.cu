// What the rans decoder does beside the words of a stream: finds the raw fields of a segment, puts them and the symbols
// of a tile together, and stores what comes of it.

struct Job {
  const u8* area;      // less the 64 bytes that the stream carries, if it does
  const u8* stream;    // behind the tile map
  u8* out;
  u32 bytes, num_coded, stream_bytes, sign, map;
  u32 num_fields;      // with the flag E, else 0
  bool mapped, plain;
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

// Where a lane's part of tile 0 lies: in each plane and in the chunk. Of that tile the first 64 bytes are not in the area,
// and what lies in front of it is read instead: at least the preamble, a table and a directory entry, more than 64 bytes.
// `set_carried` replaces it.
template <class C> struct Places {
  const u8* plane[Planes<C>::kCount];
  u8* out;

  __device__ explicit Places(const Job& job) : out(job.out + lane_of_thread() * kLaneBytes) {
    find_planes<C::kBits, 0>(job.area, job.num_coded);
  }
  template <u32 kLeft, u32 kPlane> __device__ __forceinline__ void find_planes(const u8* at, u32 num_coded) {
    if constexpr (kLeft != 0) {
      constexpr u32 kWidth = widest(kLeft);
      plane[kPlane] = at + lane_of_thread() * (kWidth * C::kUnits) / 8;
      find_planes<kLeft - kWidth, kPlane + 1>(at + plane_bytes<C::kUnits>(kWidth, num_coded), num_coded);
    }
  }
};

template <class C, u32 kLeft = C::kBits, u32 kPlane = 0>
__device__ __forceinline__ void load_planes(Planes<C>& planes, const Places<C>& places, u32 j) {
  if constexpr (kLeft != 0) {
    constexpr u32 kWidth = widest(kLeft);
    planes.bits[kPlane] = load_bits<kWidth * C::kUnits>(places.plane[kPlane] + (u64)j * (4 * C::kUnits * kWidth));
    load_planes<C, kLeft - kWidth, kPlane + 1>(planes, places, j);
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

template <class C> __device__ __forceinline__ void set_carried(Planes<C>& planes, u32 carried) {
  if constexpr (C::kBits != 0) {
    constexpr u32 kLaneBits = widest(C::kBits) * C::kUnits;
    const u64 bits = from_carried<kLaneBits>(carried);
    if (lane_of_thread() * kLaneBits < 8 * kCarriedBytes) planes.bits[0] = bits;
  }
}

// Two BF16 or F16 of slots and of two bytes of raw fields, each doubled: sign and mantissa are then where they belong.
__device__ __forceinline__ u32 join_pair(u32 first, u32 second, u32 doubled) {
  constexpr u32 kExponents = 0x7F807F80;
  const u32 low = first >> 5, high = second << 11, exponents = ((low ^ high) & 0xFFFF) ^ high;
  return ((exponents ^ doubled) & kExponents) ^ doubled;
}

// An F32, likewise, of which the upper 8 bits of the raw field come twice.
__device__ __forceinline__ u32 join_one(u32 slot, u32 doubled) {
  constexpr u32 kExponent = 0x7F800000;
  return ((slot << 11 ^ doubled) & kExponent) ^ doubled;
}

// Puts what a lane has of a tile together from slots, of which only the symbol counts, and raw fields.
template <class C>
__device__ __forceinline__ uint4 join_tile(const u32 (&slot)[C::kUnits], const Planes<C>& planes, u32 sign) {
  u32 words[4] = {0, 0, 0, 0};
  if constexpr (C::kUnitBytes == 2 && C::kBits == 8) {
    const u32 low = (u32)planes.bits[0], high = (u32)(planes.bits[0] >> 32);
    words[0] = join_pair(slot[0], slot[1], __byte_perm(low, 0, 0x1100));
    words[1] = join_pair(slot[2], slot[3], __byte_perm(low, 0, 0x3322));
    words[2] = join_pair(slot[4], slot[5], __byte_perm(high, 0, 0x1100));
    words[3] = join_pair(slot[6], slot[7], __byte_perm(high, 0, 0x3322));
  } else if constexpr (C::kUnitBytes == 4 && C::kBits == 24) {
    const u32 low = (u32)planes.bits[0], high = (u32)(planes.bits[0] >> 32), upper = (u32)planes.bits[1];
    words[0] = join_one(slot[0], __byte_perm(low, upper, 0x4410));
    words[1] = join_one(slot[1], __byte_perm(low, upper, 0x5532));
    words[2] = join_one(slot[2], __byte_perm(high, upper, 0x6610));
    words[3] = join_one(slot[3], __byte_perm(high, upper, 0x7732));
  } else {
    typename C::Value field[C::kUnits] = {};
    unpack_planes<C, C::kBits, 0, 0>(planes, field);
#pragma unroll
    for (u32 i = 0; i < C::kUnits; ++i) {
      const u32 symbol = slot[i] >> 12 & 255;
      if constexpr (C::kUnitBytes == 1) {
        words[i / 4] |= symbol << (8 * (i % 4));
      } else {
        const typename C::Value v = join<C>(symbol, field[i], sign);
        if constexpr (C::kUnitBytes == 2) words[i / 2] |= v << (16 * (i % 2));
        if constexpr (C::kUnitBytes == 4) words[i] = v;
        if constexpr (C::kUnitBytes == 8) words[2 * i] = (u32)v, words[2 * i + 1] = (u32)(v >> 32);
      }
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// How many bytes of tile t this lane has.
__device__ __forceinline__ u32 existing_of_tile(const Job& job, u32 t) {
  return existing(t * kTileBytes + lane_of_thread() * kLaneBytes, job.bytes);
}
