// Signs, exponents and mantissas of the codec planes of FRAME.md: packed to a stream each, joined again, and the body.
//
// Compiled at run time by kernel_files.py: NVRTC, C++17, no headers, compute capability 7.0 and up. Every stream, raw
// chunk and body starts at a multiple of 16; the runs inside of the mantissas need not. No kernel reads or writes past
// the sizes that it is given, rounded up to 16 where that is said, in bytes unless named otherwise.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 kThreads = 256;
constexpr u32 kUnitsPerThread = 2;   // in flight
constexpr u32 kUnitValues = 8;       // a unit has whole bytes of every run
constexpr u32 kTileBytes = 16384;    // of a body, by a thread block
constexpr u32 kEntryBytes = 16, kStartBytes = 48;
constexpr u32 kRaw = 0, kRans = 8;   // codecs of streams
constexpr u32 kReportWords = 4, kEnd = 0, kBodyBytes = 1, kRefused = 2;

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

// Byte k of word i becomes byte i of word k. Its own inverse.
__device__ __forceinline__ void transpose_4x4(u32& a, u32& b, u32& c, u32& d) {
  const u32 ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
  const u32 cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
  a = __byte_perm(ab_low, cd_low, 0x5410);
  b = __byte_perm(ab_low, cd_low, 0x7632);
  c = __byte_perm(ab_high, cd_high, 0x5410);
  d = __byte_perm(ab_high, cd_high, 0x7632);
}

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

// Calls visit.run<kWidth>(octet, bit of it, start of the run) for each run of the mantissas, in their order.
template <class W, class Visit> __device__ __forceinline__ void for_runs(u64 num_values, Visit& visit) {
  u64 start = 0;
#pragma unroll
  for (u32 k = 0; k < W::kWhole; ++k, start += num_values) visit.template run<8>(k, 0, start);
  if constexpr ((W::kRest & 4) != 0) {
    visit.template run<4>(W::kWhole, 0, start);
    start += run_bytes(num_values, 4);
  }
  if constexpr ((W::kRest & 2) != 0) {
    visit.template run<2>(W::kWhole, W::kRest & 4, start);
    start += run_bytes(num_values, 2);
  }
  if constexpr ((W::kRest & 1) != 0) visit.template run<1>(W::kWhole, W::kRest & 6, start);
}

template <class W, bool kIsWhole> struct PutRun {
  const Octets<W>& from;
  u8* mantissas;
  u64 unit;
  u32 count;
  template <u32 kWidth> __device__ __forceinline__ void run(u32 k, u32 at, u64 start) {
    put<kWidth, kIsWhole>(mantissas + start + unit * kWidth, pack<kWidth>(from.octet[k], at), (count * kWidth + 7) / 8);
  }
};

template <class W, bool kIsWhole> struct GetRun {
  Octets<W>& to;
  const u8* mantissas;
  u64 unit;
  u32 count;
  u64 loose;
  template <u32 kWidth> __device__ __forceinline__ void run(u32 k, u32 at, u64 start) {
    const u64 bits = get<kWidth, kIsWhole>(mantissas + start + unit * kWidth, (count * kWidth + 7) / 8);
    if constexpr (!kIsWhole) loose |= bits >> (count * kWidth);
    unpack<kWidth>(bits, at, to.octet[k]);
  }
};

template <class W, bool kIsWhole>
__device__ __forceinline__ void split_unit(const Octets<W>& o, u8* signs, u8* exponents, u8* mantissas, u64 num_values,
                                           u64 unit, u32 count) {
  constexpr u32 j = W::kWhole, r = W::kRest;   // the exponent's lowest bit is bit r of octet j
  u32 low[2], high[2] = {0, 0};
#pragma unroll
  for (u32 h = 0; h < 2; ++h) {
    low[h] = o.octet[j][h] >> r & in_all(0xFF >> r);
    if constexpr (W::kExponent > 8 - r) low[h] |= (o.octet[j + 1][h] & in_all(ones(r))) << (8 - r);
    if constexpr (W::kExponent < 8) low[h] &= in_all(ones(W::kExponent & 7));
    if constexpr (W::kExponent > 8) high[h] = o.octet[j + 1][h] >> r & in_all(ones(W::kExponent & 7));
  }
  if constexpr (W::kExponentBytes == 1) {
    put<8, kIsWhole>(exponents + unit * 8, (u64)low[1] << 32 | low[0], count);
  } else {
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
      const u64 four = (u64)__byte_perm(low[h], high[h], 0x7362) << 32 | __byte_perm(low[h], high[h], 0x5140);
      if (kIsWhole || count > 4 * h) put<8, kIsWhole>(exponents + unit * 16 + 8 * h, four, 2 * (count - 4 * h));
    }
  }
  if constexpr (W::kSign != 0) put<1, kIsWhole>(signs + unit, pack<1>(o.octet[W::kSize - 1], 7), 1);
  PutRun<W, kIsWhole> visit{o, mantissas, unit, count};
  for_runs<W>(num_values, visit);
}

// Returns whether a bit is set that no value has.
template <class W, bool kIsWhole>
__device__ __forceinline__ bool join_unit(Octets<W>& o, const u8* signs, const u8* exponents, const u8* mantissas,
                                          u64 num_values, u64 unit, u32 count) {
  constexpr u32 j = W::kWhole, r = W::kRest;
#pragma unroll
  for (u32 k = 0; k < W::kSize; ++k) o.octet[k][0] = o.octet[k][1] = 0;
  GetRun<W, kIsWhole> visit{o, mantissas, unit, count, 0};
  for_runs<W>(num_values, visit);
  u64 excess = visit.loose;
  if constexpr (W::kSign != 0) {
    const u64 bits = get<1, kIsWhole>(signs + unit, 1);
    if constexpr (!kIsWhole) excess |= bits >> count;
    unpack<1>(bits, 7, o.octet[W::kSize - 1]);
  }
  u32 low[2], high[2] = {0, 0};
  if constexpr (W::kExponentBytes == 1) {
    const u64 eight = get<8, kIsWhole>(exponents + unit * 8, count);
    low[0] = (u32)eight;
    low[1] = (u32)(eight >> 32);
    if constexpr (W::kExponent < 8) {
      excess |= (low[0] | low[1]) & in_all(0xFF ^ ones(W::kExponent & 7));
      low[0] &= in_all(ones(W::kExponent & 7));
      low[1] &= in_all(ones(W::kExponent & 7));
    }
  } else {
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
      const bool is_there = kIsWhole || count > 4 * h;
      const u64 four = is_there ? get<8, kIsWhole>(exponents + unit * 16 + 8 * h, 2 * (count - 4 * h)) : 0;
      low[h] = __byte_perm((u32)four, (u32)(four >> 32), 0x6420);
      high[h] = __byte_perm((u32)four, (u32)(four >> 32), 0x7531);
      excess |= high[h] & in_all(0xFF ^ ones(W::kExponent & 7));
      high[h] &= in_all(ones(W::kExponent & 7));
    }
  }
#pragma unroll
  for (u32 h = 0; h < 2; ++h) {
    o.octet[j][h] |= (low[h] & in_all(0xFF >> r)) << r;
    if constexpr (W::kExponent > 8 - r) o.octet[j + 1][h] |= low[h] >> (8 - r) & in_all(ones(r));
    if constexpr (W::kExponent > 8) o.octet[j + 1][h] |= high[h] << r;
  }
  return excess != 0;
}

// The values behind the last whole unit, fewer than 8, go value by value.
template <class W>
__device__ __forceinline__ Octets<W> octets_at(const u8* raw, u32 count) {
  Octets<W> o;
#pragma unroll
  for (u32 k = 0; k < W::kSize; ++k) {
    o.octet[k][0] = o.octet[k][1] = 0;
#pragma unroll
    for (u32 i = 0; i < kUnitValues; ++i)
      if (i < count) o.octet[k][i / 4] |= (u32)raw[i * W::kSize + k] << (8 * (i % 4));
  }
  return o;
}

template <class W>
__device__ void split_fields(const u8* raw, u64 raw_bytes, u8* signs, u8* exponents, u8* mantissas) {
  const u64 num_values = raw_bytes / W::kSize, num_units = num_values / kUnitValues;
  const u64 first = (u64)blockIdx.x * (kThreads * kUnitsPerThread) + threadIdx.x;
  Unit<W> held[kUnitsPerThread];
#pragma unroll
  for (u32 k = 0; k < kUnitsPerThread; ++k)
    if (first + k * kThreads < num_units) held[k] = reinterpret_cast<const Unit<W>*>(raw)[first + k * kThreads];
#pragma unroll
  for (u32 k = 0; k < kUnitsPerThread; ++k)
    if (first + k * kThreads < num_units)
      split_unit<W, true>(octets_of<W>(held[k]), signs, exponents, mantissas, num_values, first + k * kThreads, 8);
  const u32 rest = num_values % kUnitValues;
  if (rest != 0 && blockIdx.x == 0 && threadIdx.x == 0) {
    const Octets<W> o = octets_at<W>(raw + num_units * (kUnitValues * W::kSize), rest);
    split_unit<W, false>(o, signs, exponents, mantissas, num_values, num_units, rest);
  }
}

template <class W>
__device__ void join_fields(const u8* signs, const u8* exponents, const u8* mantissas, u8* raw, u64 raw_bytes,
                            u64* failures) {
  const u64 num_values = raw_bytes / W::kSize, num_units = num_values / kUnitValues;
  const u64 first = (u64)blockIdx.x * (kThreads * kUnitsPerThread) + threadIdx.x;
  bool is_wrong = false;
#pragma unroll
  for (u32 k = 0; k < kUnitsPerThread; ++k) {
    const u64 unit = first + k * kThreads;
    if (unit >= num_units) break;
    Octets<W> o;
    is_wrong |= join_unit<W, true>(o, signs, exponents, mantissas, num_values, unit, 8);
    reinterpret_cast<Unit<W>*>(raw)[unit] = unit_of<W>(o);
  }
  const u32 rest = num_values % kUnitValues;
  if (rest != 0 && blockIdx.x == 0 && threadIdx.x == 0) {
    Octets<W> o;
    is_wrong |= join_unit<W, false>(o, signs, exponents, mantissas, num_values, num_units, rest);
    u8* to = raw + num_units * (kUnitValues * W::kSize);
#pragma unroll
    for (u32 k = 0; k < W::kSize; ++k)
#pragma unroll
      for (u32 i = 0; i < kUnitValues; ++i)
        if (i < rest) to[i * W::kSize + k] = (u8)(o.octet[k][i / 4] >> (8 * (i % 4)));
  }
  if (is_wrong) atomicAdd(failures, 1ull);
}

#define DEFINE_KERNELS(WORD, NUMBER)                                                                            \
  extern "C" __global__ void __launch_bounds__(kThreads) split_fields_##NUMBER(                                 \
      const u8* raw, u64 raw_bytes, u8* signs, u8* exponents, u8* mantissas) {                                  \
    split_fields<WORD>(raw, raw_bytes, signs, exponents, mantissas);                                            \
  }                                                                                                             \
  extern "C" __global__ void __launch_bounds__(kThreads) join_fields_##NUMBER(                                  \
      const u8* signs, const u8* exponents, const u8* mantissas, u8* raw, u64 raw_bytes, u64* failures) {       \
    join_fields<WORD>(signs, exponents, mantissas, raw, raw_bytes, failures);                                   \
  }

DEFINE_KERNELS(U8, 0)
DEFINE_KERNELS(U16, 1)
DEFINE_KERNELS(U32, 2)
DEFINE_KERNELS(U64, 3)
DEFINE_KERNELS(F8, 4)
DEFINE_KERNELS(F16, 5)
DEFINE_KERNELS(BF16, 6)
DEFINE_KERNELS(F32, 7)
DEFINE_KERNELS(F64, 8)

// Puts entries and streams into the body and ends the report; a thread block a tile of what a body may be.
//
// Bit i of `coded`: stream i was given to rans, whose own report is inner[kReportWords * i …] and whose body begins at
// coded_…; it is stored as it is where that did not shrink. `words` has the word type of stream i in byte i. What is
// read of a stream is rounded up to 16. Nothing is written behind raw_bytes, rounded up to 16; report[kBodyBytes]
// becomes 0 where the body is not shorter than the chunk.
extern "C" __global__ void __launch_bounds__(kThreads)
append_streams(u64* report, u8* body, u64 raw_bytes, const u64* inner, const u8* signs, const u8* exponents,
               const u8* mantissas, const u8* coded_signs, const u8* coded_exponents, const u8* coded_mantissas,
               u64 sign_bytes, u64 exponent_bytes, u64 mantissa_bytes, u32 coded, u32 words) {
  const u8* from[3] = {signs, exponents, mantissas};
  const u8* const coded_from[3] = {coded_signs, coded_exponents, coded_mantissas};
  u64 stored[3] = {sign_bytes, exponent_bytes, mantissa_bytes}, end[3], at = kStartBytes;
  u32 codec[3] = {kRaw, kRaw, kRaw};
#pragma unroll
  for (u32 i = 0; i < 3; ++i) {
    const u64 made = coded >> i & 1 ? inner[kReportWords * i + kBodyBytes] : 0;
    if (made != 0) {
      codec[i] = kRans;
      from[i] = coded_from[i];
      stored[i] = made;
    }
    at += (stored[i] + 15) & ~15ull;
    end[i] = at;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    report[kEnd] = at;
    report[kBodyBytes] = at < raw_bytes ? at : 0;
    report[kRefused] = 0;
  }
  if (at >= raw_bytes) return;
  if (blockIdx.x == 0 && threadIdx.x < 3) {
    const u32 i = threadIdx.x;
    const u32 of = i == 0 ? codec[0] : i == 1 ? codec[1] : codec[2];
    const u64 bytes = i == 0 ? stored[0] : i == 1 ? stored[1] : stored[2];
    reinterpret_cast<uint4*>(body)[i] =
        make_uint4(of | 1u << 8 | (words >> (8 * i) & 0xFF) << 16, 0, (u32)bytes, (u32)(bytes >> 32));
  }
  const u64 tile = kStartBytes + (u64)blockIdx.x * kTileBytes;
  for (u64 u = tile + 16 * threadIdx.x; u < tile + kTileBytes && u < at; u += 16 * kThreads) {
    const bool in_0 = u < end[0], in_1 = u < end[1];
    const u8* source = in_0 ? from[0] : in_1 ? from[1] : from[2];
    const u64 begin = in_0 ? kStartBytes : in_1 ? end[0] : end[1];
    const u64 bytes = in_0 ? stored[0] : in_1 ? stored[1] : stored[2];
    uint4 q = *reinterpret_cast<const uint4*>(source + (u - begin));
    const u64 left = bytes - (u - begin);
    if (left < 16) {
      u32 word[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
      for (u32 i = 0; i < 4; ++i)
        word[i] = left <= 4 * i ? 0 : left < 4 * i + 4 ? word[i] & ones(8 * ((u32)left % 4)) : word[i];
      q = make_uint4(word[0], word[1], word[2], word[3]);
    }
    *reinterpret_cast<uint4*>(body + u) = q;
  }
}

// Counts the bytes that are not zero behind the three streams of a body, each of which ends inside its last 16.
extern "C" __global__ void __launch_bounds__(kThreads)
check_ends(const u8* body, u64 end_0, u64 end_1, u64 end_2, u64* failures) {
  if (threadIdx.x >= 3 * 16) return;
  const u32 i = threadIdx.x / 16;
  const u64 end = i == 0 ? end_0 : i == 1 ? end_1 : end_2, at = end + threadIdx.x % 16;
  if (at < ((end + 15) & ~15ull) && body[at] != 0) atomicAdd(failures, 1ull);
}
