// How the codec planes of FRAME.md cuts the words, eight at a time, and packs bits; kernel_files.py puts it in front of
// fields.cu. Compiled at run time: NVRTC, C++17, no headers, compute capability 7.0 and up.

constexpr u32 kThreads = 256;
constexpr u32 kUnitsPerThread = 2;   // in flight
constexpr u32 kUnitValues = 8;       // a unit has whole bytes of every run

template <u32 kSize_, u32 kSign_, u32 kExponent_>
struct Word {
  static constexpr u32 kSize = kSize_, kSign = kSign_, kExponent = kExponent_;   // bytes; bits
  static constexpr u32 kMantissa = 8 * kSize - kSign - kExponent;
  static constexpr u32 kWhole = kMantissa / 8, kRest = kMantissa % 8;   // runs of whole bytes; bits of the others
  static constexpr u32 kExponentBytes = kExponent > 8 ? 2 : 1;
};
typedef Word<1, 0, 8> U8;
typedef Word<2, 0, 8> U16;
typedef Word<4, 0, 8> U32;
typedef Word<8, 0, 8> U64;
typedef Word<1, 1, 4> F8;
typedef Word<2, 1, 5> F16;
typedef Word<2, 1, 8> BF16;
typedef Word<4, 1, 8> F32;
typedef Word<8, 1, 11> F64;

// Eight values, byte k of each: four of them in octet[k][0], four in octet[k][1], the first lowest.
template <class W> struct Octets { u32 octet[W::kSize][2]; };
// As they lie in memory.
template <class W> struct alignas(W::kSize == 1 ? 8 : 16) Unit { u32 word[2 * W::kSize]; };

__device__ constexpr u32 in_all(u32 octet) { return octet * 0x01010101u; }
__device__ constexpr u32 ones(u32 bits) { return (1u << bits) - 1; }

template <class W> __device__ __forceinline__ Octets<W> octets_of(const Unit<W>& unit) {
  Octets<W> o;
#pragma unroll
  for (u32 h = 0; h < 2; ++h) {
    if constexpr (W::kSize == 1) {
      o.octet[0][h] = unit.word[h];
    } else if constexpr (W::kSize == 2) {
      o.octet[0][h] = __byte_perm(unit.word[2 * h], unit.word[2 * h + 1], 0x6420);
      o.octet[1][h] = __byte_perm(unit.word[2 * h], unit.word[2 * h + 1], 0x7531);
    } else {
      constexpr u32 kStep = W::kSize / 4;   // 32-bit words of a value
#pragma unroll
      for (u32 part = 0; part < kStep; ++part) {
        const u32* from = unit.word + 4 * kStep * h + part;
        u32 a = from[0], b = from[kStep], c = from[2 * kStep], d = from[3 * kStep];
        transpose_4x4(a, b, c, d);
        o.octet[4 * part][h] = a;
        o.octet[4 * part + 1][h] = b;
        o.octet[4 * part + 2][h] = c;
        o.octet[4 * part + 3][h] = d;
      }
    }
  }
  return o;
}

template <class W> __device__ __forceinline__ Unit<W> unit_of(const Octets<W>& o) {
  Unit<W> unit;
#pragma unroll
  for (u32 h = 0; h < 2; ++h) {
    if constexpr (W::kSize == 1) {
      unit.word[h] = o.octet[0][h];
    } else if constexpr (W::kSize == 2) {
      unit.word[2 * h] = __byte_perm(o.octet[0][h], o.octet[1][h], 0x5140);
      unit.word[2 * h + 1] = __byte_perm(o.octet[0][h], o.octet[1][h], 0x7362);
    } else {
      constexpr u32 kStep = W::kSize / 4;
#pragma unroll
      for (u32 part = 0; part < kStep; ++part) {
        u32* to = unit.word + 4 * kStep * h + part;
        u32 a = o.octet[4 * part][h], b = o.octet[4 * part + 1][h];
        u32 c = o.octet[4 * part + 2][h], d = o.octet[4 * part + 3][h];
        transpose_4x4(a, b, c, d);
        to[0] = a;
        to[kStep] = b;
        to[2 * kStep] = c;
        to[3 * kStep] = d;
      }
    }
  }
  return unit;
}

// Of 8 octets, the kWidth bits from bit `at` on, packed: 8 * kWidth bits.
template <u32 kWidth> __device__ __forceinline__ u64 pack(const u32 (&octet)[2], u32 at) {
  if constexpr (kWidth == 8) return (u64)octet[1] << 32 | octet[0];
  u32 half[2];
#pragma unroll
  for (u32 h = 0; h < 2; ++h) {
    u32 t = octet[h] >> at & in_all(ones(kWidth & 7));
    if constexpr (kWidth == 4) t |= t >> 4;              // in bytes 0 and 2
    if constexpr (kWidth == 2) { t |= t >> 6; t = (t | t >> 12) & 0xFF; }
    if constexpr (kWidth == 1) t = t * 0x01020408u >> 24;
    half[h] = t;
  }
  if constexpr (kWidth == 4) return __byte_perm(half[0], half[1], 0x6420);
  return half[0] | half[1] << (4 * kWidth);
}

// Adds to 8 octets what `pack` took.
template <u32 kWidth> __device__ __forceinline__ void unpack(u64 bits, u32 at, u32 (&octet)[2]) {
#pragma unroll
  for (u32 h = 0; h < 2; ++h) {
    const u32 mine = (u32)(bits >> (4 * kWidth * h));
    u32 t = mine;
    if constexpr (kWidth == 4) { t = __byte_perm(mine, 0, 0x4140); t = (t | t << 4) & 0x0F0F0F0Fu; }
    if constexpr (kWidth == 2) { t = (mine | mine << 12) & 0x000F000Fu; t = (t | t << 6) & 0x03030303u; }
    if constexpr (kWidth == 1) t = (mine & 0xF) * 0x00204081u & 0x01010101u;
    octet[h] |= t << at;
  }
}

// `kBytes` bytes at any address, in one access where that can be. Of a unit that is not whole only the first `count`.
template <u32 kBytes, bool kIsWhole> __device__ __forceinline__ void put(u8* to, u64 bits, u32 count) {
  if (kIsWhole && reinterpret_cast<u64>(to) % kBytes == 0) {
    if constexpr (kBytes == 8) *reinterpret_cast<uint2*>(to) = make_uint2((u32)bits, (u32)(bits >> 32));
    if constexpr (kBytes == 4) *reinterpret_cast<u32*>(to) = (u32)bits;
    if constexpr (kBytes == 2) *reinterpret_cast<u16*>(to) = (u16)bits;
    if constexpr (kBytes == 1) *to = (u8)bits;
    return;
  }
#pragma unroll
  for (u32 i = 0; i < kBytes; ++i)
    if (i < count) to[i] = (u8)(bits >> (8 * i));
}

template <u32 kBytes, bool kIsWhole> __device__ __forceinline__ u64 get(const u8* from, u32 count) {
  if (kIsWhole && reinterpret_cast<u64>(from) % kBytes == 0) {
    if constexpr (kBytes == 8) {
      const uint2 both = *reinterpret_cast<const uint2*>(from);
      return (u64)both.y << 32 | both.x;
    }
    if constexpr (kBytes == 4) return *reinterpret_cast<const u32*>(from);
    if constexpr (kBytes == 2) return *reinterpret_cast<const u16*>(from);
    if constexpr (kBytes == 1) return *from;
  }
  u64 bits = 0;
#pragma unroll
  for (u32 i = 0; i < kBytes; ++i)
    if (i < count) bits |= (u64)from[i] << (8 * i);
  return bits;
}

__device__ __forceinline__ u64 run_bytes(u64 num_values, u32 width) { return (num_values * width + 7) / 8; }

