// What planes.cu and fields.cu have in common; kernel_files.py puts it in front of them.
// Compiled at run time: NVRTC, C++17, no headers, compute capability 7.0 and up.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Byte k of word i becomes byte i of word k. Its own inverse.
__device__ __forceinline__ void transpose_4x4(u32& a, u32& b, u32& c, u32& d) {
  const u32 ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
  const u32 cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
  a = __byte_perm(ab_low, cd_low, 0x5410);
  b = __byte_perm(ab_low, cd_low, 0x7632);
  c = __byte_perm(ab_high, cd_high, 0x5410);
  d = __byte_perm(ab_high, cd_high, 0x7632);
}
