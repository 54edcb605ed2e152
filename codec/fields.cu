// Signs, exponents and mantissas of the codec planes of FRAME.md: packed to a stream each, and joined again.
//
// fields_units.cu comes first. Every stream and raw chunk starts at a multiple of 16; the runs inside of the mantissas
// need not. No kernel reads or writes past the sizes that it is given, in bytes unless named otherwise.

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
