// The body of the codec planes of FRAME.md: entries and streams, put together, and the padding behind these.
//
// Compiled at run time by kernel_files.py: NVRTC, C++17, no headers, compute capability 7.0 and up. Every stream and body
// starts at a multiple of 16. No kernel reads or writes past the sizes that it is given, rounded up to 16, in bytes.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 kThreads = 256;
constexpr u32 kTileBytes = 16384;   // of a body, by a thread block
constexpr u32 kStartBytes = 48;
constexpr u32 kRaw = 0, kRans = 8;   // codecs of streams
constexpr u32 kReportWords = 4, kEnd = 0, kBodyBytes = 1, kRefused = 2;

__device__ constexpr u32 ones(u32 bits) { return (1u << bits) - 1; }

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
