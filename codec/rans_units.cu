// How RANS.md cuts a value into a symbol and a raw field, and packs raw fields into planes. What the files of the rans
// kernels have in common; kernel_files.py puts it in front of each.
//
// Compiled at run time: NVRTC, C++17, no headers, compute capability 7.0 and up. One warp works on a segment; "lane" is
// the thread's number in its warp. All lanes of a warp call these functions together.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 kThreads = 256;
constexpr u32 kAll = 0xFFFFFFFFu, kLanes = 32, kWarps = kThreads / kLanes;
constexpr u32 kTileBytes = 512, kLaneBytes = 16, kSymbols = 256, kStateBytes = 128, kMapBytes = 32, kCarriedBytes = 64;
constexpr u32 kLowestState = 65536;
constexpr u32 kZero = 0, kConstant = 1, kPlain = 2, kCoded = 3;   // kinds of a segment
constexpr u32 kOneSign = 1, kNoHigh = 2, kShort = 4;              // its flags N, H and L
constexpr u32 kEmptySymbol = 255;                                 // of a unit of 0 in a segment with the flag E

__device__ __forceinline__ u32 smaller(u32 a, u32 b) { return a < b ? a : b; }
__device__ __forceinline__ u64 smaller(u64 a, u64 b) { return a < b ? a : b; }
__device__ __forceinline__ u32 round_up_16(u32 n) { return (n + 15) & ~15u; }
__device__ __forceinline__ u32 lane_of_thread() { return threadIdx.x % kLanes; }
__device__ __forceinline__ u32 lanes_below() {   // volatile, so that it is read once and kept
  u32 mask;
  asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(mask));
  return mask;
}

template <u32 kBytes> struct Word { typedef u32 Type; };
template <> struct Word<8> { typedef u64 Type; };

// Units of kUnitBytes in a segment with some flags.
template <u32 kUnitBytes_, u32 kFlags_>
struct Cut {
  static constexpr u32 kUnitBytes = kUnitBytes_, kFlags = kFlags_;
  static constexpr u32 kUnits = kLaneBytes / kUnitBytes;   // of a lane in a tile
  static constexpr u32 kMantissa = kUnitBytes == 2 ? 7 : kUnitBytes == 4 ? 23 : kUnitBytes == 8 ? 52 : 0;
  static constexpr u32 kDropped = !(kFlags & kShort) ? 0 : kUnitBytes == 8 ? 29 : 16;
  static constexpr u32 kLow = kMantissa - kDropped;
  static constexpr u32 kHigh = kUnitBytes == 8 && !(kFlags & kNoHigh) ? 3 : 0;
  static constexpr u32 kSign = kUnitBytes > 1 && !(kFlags & kOneSign) ? 1 : 0;
  static constexpr u32 kBits = kLow + kHigh + kSign;       // of a raw field
  typedef typename Word<kUnitBytes>::Type Value;
};

constexpr u32 kShift64 = 1153;   // added to the exponent of an F64, modulo 2048

template <class Value> __device__ __forceinline__ u32 high_exponent(Value v) {   // of an F64: 11 bits
  return (((u32)(v >> 52) & 2047) + kShift64) & 2047;
}

template <class C> __device__ __forceinline__ void values_of(uint4 q, typename C::Value (&value)[C::kUnits]) {
  const u32 words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
  for (u32 i = 0; i < C::kUnits; ++i) {
    if constexpr (C::kUnitBytes == 8)
      value[i] = (u64)words[2 * i + 1] << 32 | words[2 * i];
    else if constexpr (C::kUnitBytes == 4)
      value[i] = words[i];
    else if constexpr (C::kUnitBytes == 2)
      value[i] = words[i / 2] >> (16 * (i % 2)) & 0xFFFF;
    else
      value[i] = words[i / 4] >> (8 * (i % 4)) & 0xFF;
  }
}

template <class C> __device__ __forceinline__ u32 symbol_of(typename C::Value v) {
  if constexpr (C::kUnitBytes == 8)
    return high_exponent(v) & 255;
  else
    return (u32)(v >> C::kMantissa) & 255;
}

template <class C> __device__ __forceinline__ typename C::Value field_of(typename C::Value v) {
  typedef typename C::Value Value;
  Value field = (v & (((Value)1 << C::kMantissa) - 1)) >> C::kDropped;
  if constexpr (C::kHigh != 0) field |= (Value)(high_exponent(v) >> 8) << C::kLow;
  if constexpr (C::kSign != 0) field |= v >> (8 * C::kUnitBytes - 1) << (C::kBits - 1);
  return field;
}

template <class C> __device__ __forceinline__ typename C::Value join(u32 symbol, typename C::Value field, u32 sign) {
  typedef typename C::Value Value;
  u32 exponent = symbol;
  if constexpr (C::kHigh != 0) exponent |= ((u32)(field >> C::kLow) & 7) << 8;
  if constexpr (C::kUnitBytes == 8) exponent = (exponent + 2048 - kShift64) & 2047;
  Value v = (Value)exponent << C::kMantissa | (field & (((Value)1 << C::kLow) - 1)) << C::kDropped;
  const Value top = C::kSign != 0 ? (field >> (C::kBits - 1)) & 1 : (Value)sign;
  return v | top << (8 * C::kUnitBytes - 1);
}

// Planes. A lane has kBits of each plane of a tile, from bit lane * kBits on.

__device__ constexpr u32 widest(u32 bits) {
  u32 width = 32;
  while (width > bits) width /= 2;
  return width;
}

// Of a segment with `tiles` coded tiles: bytes of the planes of raw fields of `bits` bits.
template <u32 kUnits> __device__ constexpr u32 plane_bytes(u32 width, u32 tiles) { return (4 * kUnits * width * tiles + 15) & ~15u; }

template <u32 kBits> __device__ __forceinline__ void store_bits(u8* tile, u64 bits, u32 skipped_bytes) {
  const u32 lane = lane_of_thread(), at = lane * kBits / 8;
  u32 low = (u32)bits;
  if constexpr (kBits < 4) low |= __shfl_down_sync(kAll, low, 2) << 4 | __shfl_down_sync(kAll, low, 1) << 2 |
                                  __shfl_down_sync(kAll, low, 3) << 6;
  if constexpr (kBits == 4) low |= __shfl_down_sync(kAll, low, 1) << 4;
  if (at < skipped_bytes) return;
  if constexpr (kBits == 64)
    *reinterpret_cast<uint2*>(tile + at) = make_uint2(low, (u32)(bits >> 32));
  else if constexpr (kBits == 32)
    *reinterpret_cast<u32*>(tile + at) = low;
  else if constexpr (kBits == 16)
    *reinterpret_cast<u16*>(tile + at) = (u16)low;
  else if (lane * kBits % 8 == 0)
    tile[at] = (u8)low;
}

// Of `mine`, where this lane's bits start; they may start inside that byte.
template <u32 kBits> __device__ __forceinline__ u64 load_bits(const u8* mine) {
  if constexpr (kBits == 64) {
    const uint2 both = *reinterpret_cast<const uint2*>(mine);
    return (u64)both.y << 32 | both.x;
  } else if constexpr (kBits == 32) {
    return *reinterpret_cast<const u32*>(mine);
  } else if constexpr (kBits == 16) {
    return *reinterpret_cast<const u16*>(mine);
  } else {
    return *mine >> (lane_of_thread() * kBits % 8) & ((1u << kBits) - 1);
  }
}

// What a lane has of the plane of `kWidth` bits from bit kLowest of the raw fields on.
template <class C, u32 kWidth, u32 kLowest>
__device__ __forceinline__ u64 pack_plane(const typename C::Value (&value)[C::kUnits]) {
  constexpr u64 kMask = ((u64)1 << kWidth) - 1;
  u64 bits = 0;
#pragma unroll
  for (u32 i = 0; i < C::kUnits; ++i) bits |= ((u64)(field_of<C>(value[i]) >> kLowest) & kMask) << (kWidth * i);
  return bits;
}

template <class C, u32 kWidth, u32 kLowest>
__device__ __forceinline__ void unpack_plane(u64 bits, typename C::Value (&field)[C::kUnits]) {
  constexpr u64 kMask = ((u64)1 << kWidth) - 1;
#pragma unroll
  for (u32 i = 0; i < C::kUnits; ++i)
    field[i] |= (typename C::Value)(bits >> (kWidth * i) & kMask) << kLowest;
}

// The 16 bits of the first plane that the stream carries for this lane, of `bits` of that plane, kBits a lane.
template <u32 kBits> __device__ __forceinline__ u32 carried_of(u64 bits) {
  constexpr u32 kParts = kBits / 16;
  const u32 lane = lane_of_thread(), part = lane % kParts;
  const u32 low = __shfl_sync(kAll, (u32)bits, lane / kParts), high = __shfl_sync(kAll, (u32)(bits >> 32), lane / kParts);
  return (part & 2 ? high : low) >> (16 * (part & 1)) & 0xFFFF;
}

// Undoes it: what this lane has of the first 64 bytes of the first plane, if it has any of them.
template <u32 kBits> __device__ __forceinline__ u64 from_carried(u32 carried) {
  constexpr u32 kParts = kBits / 16;
  const u32 lane = lane_of_thread();
  u64 bits = 0;
#pragma unroll
  for (u32 part = 0; part < kParts; ++part)
    bits |= (u64)(__shfl_sync(kAll, carried, (lane * kParts + part) % kLanes) & 0xFFFF) << (16 * part);
  return bits;
}

// With the flag E the planes of the raw fields have whole bytes, and a unit of 0 has no field. `first` is where the first of
// the m fields of a segment lies in the first plane; `index` below m.

__device__ constexpr u32 sparse_plane_bytes(u32 width, u32 num_fields) { return (num_fields * (width / 8) + 15) & ~15u; }

template <class C, u32 kLeft = C::kBits, u32 kLowest = 0>
__device__ __forceinline__ void store_field(typename C::Value field, u8* first, u32 num_fields, u32 index) {
  if constexpr (kLeft != 0) {
    constexpr u32 kWidth = widest(kLeft);
    static_assert(kWidth >= 8, "such planes have no flag E");
    const u32 bits = (u32)(field >> kLowest);
    if constexpr (kWidth == 32)
      reinterpret_cast<u32*>(first)[index] = bits;
    else if constexpr (kWidth == 16)
      reinterpret_cast<u16*>(first)[index] = (u16)bits;
    else
      first[index] = (u8)bits;
    u8* next = first + sparse_plane_bytes(kWidth, num_fields);
    store_field<C, kLeft - kWidth, kLowest + kWidth>(field, next, num_fields, index);
  }
}

template <class C, u32 kLeft = C::kBits, u32 kLowest = 0>
__device__ __forceinline__ typename C::Value load_field(const u8* first, u32 num_fields, u32 index) {
  typedef typename C::Value Value;
  if constexpr (kLeft == 0) {
    return 0;
  } else {
    constexpr u32 kWidth = widest(kLeft);
    u32 bits;
    if constexpr (kWidth == 32)
      bits = reinterpret_cast<const u32*>(first)[index];
    else if constexpr (kWidth == 16)
      bits = reinterpret_cast<const u16*>(first)[index];
    else
      bits = first[index];
    const u8* next = first + sparse_plane_bytes(kWidth, num_fields);
    return (Value)bits << kLowest | load_field<C, kLeft - kWidth, kLowest + kWidth>(next, num_fields, index);
  }
}

// The sum of `mine` over the lanes below; `total` becomes that over all.
__device__ __forceinline__ u32 sum_before_lane(u32 mine, u32& total) {
  u32 sum = mine;
#pragma unroll
  for (u32 distance = 1; distance < kLanes; distance *= 2) {
    const u32 below = __shfl_up_sync(kAll, sum, distance);
    if (lane_of_thread() >= distance) sum += below;
  }
  total = __shfl_sync(kAll, sum, kLanes - 1);
  return sum - mine;
}

// The tile map of a segment: bit t of 256, word w in lane w. Returns the first coded tile from t on; there must be one.
__device__ __forceinline__ u32 coded_tile_from(u32 t, u32 map) {
  u32 word = __shfl_sync(kAll, map, t / 32) & (kAll << t % 32);
  while (word == 0) {
    t = (t / 32 + 1) * 32;
    word = __shfl_sync(kAll, map, t / 32);
  }
  return t / 32 * 32 + __ffs(word) - 1;
}
