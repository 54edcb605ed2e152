// Compares many pieces of device memory with what a rule makes of others, in one launch.
//
// Compiled at run time by kernel_files.py: NVRTC, C++17, no headers, compute capability 7.0 and up. No kernel reads
// past the sizes that it is given. The rules are those of storage/FORMAT.md: 0 same, 1 bf16-of-f32, 2 f16-of-f32.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 kThreads = 256;
constexpr u32 kInFlight = 4;

// Round to nearest, ties to even, by integers: NaN has no case of its own.
struct Bf16 {
  static __device__ __forceinline__ bool differs(u32 bits, u32 half) {
    return ((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16) != half;
  }
};

// A NaN never follows: its payload depends on who rounds.
struct F16 {
  static __device__ __forceinline__ bool differs(u32 bits, u32 half) {
    u16 made;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(made) : "f"(__uint_as_float(bits)));
    return (bits & 0x7fffffffu) > 0x7f800000u || made != half;
  }
};

// Whether a thread block that has this piece too has found a difference.
__device__ __forceinline__ bool is_over(const u32* flag) { return *reinterpret_cast<const volatile u32*>(flag) != 0; }

template <class Rule>
__device__ bool rounding_differs(const u8* source, const u8* target, u64 size, u32 part, u32 parts, const u32* flag) {
  const u64 count = size / 2, step = (u64)parts * kThreads;
  const bool is_aligned = reinterpret_cast<u64>(source) % 16 == 0 && reinterpret_cast<u64>(target) % 8 == 0;
  const u64 quads = is_aligned ? count / 4 : 0;
  bool differs = false;
  for (u64 base = (u64)part * kThreads + threadIdx.x; base < quads; base += step * kInFlight) {
    uint4 bits[kInFlight];
    uint2 halves[kInFlight];
#pragma unroll
    for (u32 k = 0; k < kInFlight; ++k) {
      if (base + k * step >= quads) continue;
      bits[k] = reinterpret_cast<const uint4*>(source)[base + k * step];
      halves[k] = reinterpret_cast<const uint2*>(target)[base + k * step];
    }
#pragma unroll
    for (u32 k = 0; k < kInFlight; ++k) {
      if (base + k * step >= quads) continue;
      differs |= Rule::differs(bits[k].x, halves[k].x & 0xffffu) | Rule::differs(bits[k].y, halves[k].x >> 16) |
                 Rule::differs(bits[k].z, halves[k].y & 0xffffu) | Rule::differs(bits[k].w, halves[k].y >> 16);
    }
    if (differs || is_over(flag)) return differs;
  }
  for (u64 i = quads * 4 + (u64)part * kThreads + threadIdx.x; i < count; i += step) {
    differs |= Rule::differs(reinterpret_cast<const u32*>(source)[i], reinterpret_cast<const u16*>(target)[i]);
    if (differs) return true;
  }
  return differs;
}

__device__ bool bytes_differ(const u8* source, const u8* target, u64 size, u32 part, u32 parts, const u32* flag) {
  const u64 step = (u64)parts * kThreads;
  const bool is_aligned = (reinterpret_cast<u64>(source) | reinterpret_cast<u64>(target)) % 16 == 0;
  const u64 quads = is_aligned ? size / 16 : 0;
  for (u64 i = (u64)part * kThreads + threadIdx.x; i < quads; i += step) {
    const uint4 a = reinterpret_cast<const uint4*>(source)[i], b = reinterpret_cast<const uint4*>(target)[i];
    if (a.x != b.x || a.y != b.y || a.z != b.z || a.w != b.w) return true;
    if (is_over(flag)) return false;
  }
  for (u64 i = quads * 16 + (u64)part * kThreads + threadIdx.x; i < size; i += step)
    if (source[i] != target[i]) return true;
  return false;
}

// items[5 * k]: source, target, bytes of the target, rule and number of the flag of piece k. flags[i] becomes 1 where
// one of its pieces differs. `parts` thread blocks a piece. Others write this memory at other times: plain loads only.
extern "C" __global__ void __launch_bounds__(kThreads)
compare_pieces(const u64* items, u32 parts, u32* flags) {
  const u64* item = items + 5ull * (blockIdx.x / parts);
  const u32 part = blockIdx.x % parts;
  const u8* source = reinterpret_cast<const u8*>(item[0]);
  const u8* target = reinterpret_cast<const u8*>(item[1]);
  const u64 size = item[2], rule = item[3];
  u32* flag = flags + item[4];
  if (is_over(flag)) return;
  const bool differs = rule == 1   ? rounding_differs<Bf16>(source, target, size, part, parts, flag)
                       : rule == 2 ? rounding_differs<F16>(source, target, size, part, parts, flag)
                                   : bytes_differ(source, target, size, part, parts, flag);
  if (differs) *flag = 1;
}
