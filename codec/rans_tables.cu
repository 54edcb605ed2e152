// The tables of the rans encoder, which segments have which, and where their raw areas start.

__device__ __forceinline__ u32 greatest_of_warp(u32 n) {
#pragma unroll
  for (u32 apart = 16; apart > 0; apart /= 2) {
    const u32 other = __shfl_xor_sync(kAll, n, apart);
    n = other > n ? other : n;
  }
  return n;
}

// What the coder looks up of a symbol of frequency f and start a:
//   x  f << 20, less 1: a greater state emits a word first; y  the reciprocal
//   z  a                                               w  bit 31 increment, bit 30 no such symbol, bits 8 … kSum - f, 0 … shift
// so that state / f = (state + increment) * y >> (32 + shift), exactly, for every state below f << 20. Rounded up the
// reciprocal is exact unless f is above 2,048, or 1; rounded down, with the increment, it is where it is not. (With N =
// 31 + shift + 1 and e = y f - 2^N: exact if e (f << 20) <= 2^N; one of both roundings has e <= f / 2 <= 2^(shift).)

__device__ uint4 code_entry(u32 f, u32 start) {
  if (f == 0) return make_uint4(kAll, 0, 0, 1u << 30);
  if (f == 1) return make_uint4((1u << 20) - 1, kAll, start, 1u << 31 | (kSum - 1) << 8);
  u32 shift = 0;
  while ((2u << shift) < f) ++shift;
  const u64 power = 1ull << (32 + shift), up = (power + f - 1) / f, error = up * f - power;
  const bool down = error * ((u64)f << 20) > power;
  return make_uint4((f << 20) - 1, (u32)up - down, start, (down ? 1u << 31 : 0) | (kSum - f) << 8 | shift);
}

// One warp, symbols 8 * lane … of each lane: brings the frequencies to their sum and makes the wide ones.
__device__ void settle(u32* frequency, u32* wide) {
  const u32 lane = lane_of_thread();
  u32 f[8], sum = 0;
#pragma unroll
  for (u32 i = 0; i < 8; ++i) sum += f[i] = frequency[8 * lane + i];
  int missing = (int)kSum - (int)sum_of_warp(sum);
  u32 greatest;
  for (;;) {
    u32 key = 0;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
      const u32 mine = f[i] << 8 | (255 - (8 * lane + i));   // of equals, the lowest symbol
      key = mine > key ? mine : key;
    }
    key = greatest_of_warp(key);
    greatest = 255 - key % 256;
    if (missing == 0) break;
    const u32 eighth = (key >> 8) / 8 > 1 ? (key >> 8) / 8 : 1;
    const int change = missing > 0 ? missing : -(int)smaller((u32)-missing, eighth);
#pragma unroll
    for (u32 i = 0; i < 8; ++i)
      if (8 * lane + i == greatest) f[i] += change;
    missing -= change;
  }
  u32 w[8];
  sum = 0;
#pragma unroll
  for (u32 i = 0; i < 8; ++i) sum += w[i] = 1 + f[i] * (kSum - kSymbols) / kSum;
  sum = sum_of_warp(sum);
#pragma unroll
  for (u32 i = 0; i < 8; ++i) {
    if (8 * lane + i == greatest) w[i] += kSum - sum;
    frequency[8 * lane + i] = f[i];
    wide[8 * lane + i] = w[i];
  }
}

// Which groups have which table: rule 4 of the writer in RANS.md. A group is 2^shift thread blocks of the kernel before.
constexpr u32 kMaxGroups = 512, kKeysPerSymbol = 4;
constexpr u32 kNotCounted = kAll >> 1;

struct Groups {
  uint4 order[kMaxGroups / 4];   // of each group: key * kMaxGroups + its number, or kNotCounted
  u32 members[kMaxGroups];       // the groups of the table
  u32 sums[kWarps];
};

// `sums` holds what was counted, and the sum of the symbols, of each block of the group.
__device__ u32 order_of(u32 group, u32 shift, u32 num_blocks, const uint2* sums) {
  const u32 end = smaller((group + 1) << shift, num_blocks);
  u64 counted = 0, weighted = 0;
  for (u32 b = group << shift; b < end; ++b) counted += sums[b].x, weighted += sums[b].y;
  return counted == 0 ? kNotCounted : (u32)(weighted * kKeysPerSymbol / counted) * kMaxGroups + group;
}

// Puts the groups of a table into the room and tells their blocks; returns how many there are.
__device__ u32 find_members(u32 table, u32 num_tables, u32 shift, u32 num_blocks, const uint2* sums, u32* block_tables,
                            Groups& room) {
  constexpr u32 kOwn = kMaxGroups / kThreads;
  u32 mine[kOwn], rank[kOwn], counted = 0, num_counted;
#pragma unroll
  for (u32 i = 0; i < kOwn; ++i) {
    const u32 group = i * kThreads + threadIdx.x;
    reinterpret_cast<u32*>(room.order)[group] = mine[i] = order_of(group, shift, num_blocks, sums);
    counted += mine[i] != kNotCounted;
    rank[i] = 0;
  }
  sum_before(counted, room.sums, num_counted);   // has a barrier behind what was written
  const u32 num_groups = (num_blocks + (1u << shift) - 1) >> shift;
#pragma unroll 4
  for (u32 q = 0; q < (num_groups + 3) / 4; ++q) {
    const uint4 other = room.order[q];
#pragma unroll
    for (u32 i = 0; i < kOwn; ++i) {   // adds 1 for each that is less: all have 31 bits
      rank[i] += ((other.x - mine[i]) >> 31) + ((other.y - mine[i]) >> 31);
      rank[i] += ((other.z - mine[i]) >> 31) + ((other.w - mine[i]) >> 31);
    }
  }
  const u32 first = (table * num_counted + num_tables - 1) / num_tables;
#pragma unroll
  for (u32 i = 0; i < kOwn; ++i) {
    const bool is_counted = mine[i] != kNotCounted;
    if ((is_counted ? rank[i] * num_tables / num_counted : 0) != table) continue;
    const u32 group = i * kThreads + threadIdx.x, end = smaller((group + 1) << shift, num_blocks);
    if (is_counted) room.members[rank[i] - first] = group;
    for (u32 b = group << shift; b < end; ++b) block_tables[b] = table;
  }
  __syncthreads();
  return ((table + 1) * num_counted + num_tables - 1) / num_tables - first;
}

// `counts` holds one histogram a thread block of the kernel before.
__device__ void make_table(const u32* counts, const u32* members, u32 num_members, u32 shift, u32 num_blocks, u32 spread,
                           uint4* entries, u8* packed, u32* packed_bytes) {
  __shared__ u32 counted[kSymbols], frequency[kSymbols], wide[kSymbols], room[kWarps];
  const u32 s = threadIdx.x;
  u32 mine = 0, total;
#pragma unroll 8
  for (u32 i = 0; i < num_members << shift; ++i) {
    const u32 b = (members[i >> shift] << shift) + (i & ((1u << shift) - 1));
    mine += b < num_blocks ? counts[b * kSymbols + s] : 0;
  }
  sum_before(mine, room, total);
  if (total == 0) {
    mine = s == 0;
    total = 1;
  }
  counted[s] = mine;
  __syncthreads();
  bool present = mine != 0;
  const u32 last = smaller(s + 8 * spread, kSymbols - 1);
  for (u32 i = s > 2 * spread ? s - 2 * spread : 0; i <= last; ++i)
    present |= i != kEmptySymbol && counted[i] != 0;
  const u32 f = (u32)(((u64)mine * kSum + total / 2) / total);
  frequency[s] = !present ? 0 : f ? f : 1;
  __syncthreads();
  if (s < kLanes) settle(frequency, wide);
  __syncthreads();
  u32 sum;
  const u32 before = sum_before(frequency[s], room, sum), wide_before = sum_before(wide[s], room, sum);
  entries[s] = code_entry(frequency[s], before);
  entries[kSymbols + s] = code_entry(wide[s], wide_before);
  const u32 rank = sum_before(present ? 1u : 0u, room, sum);
  const u32 here = __ballot_sync(kAll, present);
  if (s % kLanes == 0) reinterpret_cast<u32*>(packed)[s / kLanes] = here;
  if (present) reinterpret_cast<u16*>(packed + 32)[rank] = (u16)frequency[s];
  if (s == 0) *packed_bytes = 32 + 2 * sum;
}

// Turns the bytes of raw areas into where they start in the raw region, for the segments of a run of thread blocks of the
// kernel before; the last run also gets where the region ends.
__device__ void place_areas(u32 first_block, u32 end_block, u32 num_segments, const u32* block_areas, u64* raw_offsets) {
  __shared__ u64 room[kWarps];
  u64 end = sum_of_block(block_areas, first_block, room);
  const u32 last = smaller(end_block * kWarps, num_segments);
  for (u32 base = first_block * kWarps; base < last; base += kThreads) {
    const u32 s = base + threadIdx.x;
    u64 total;
    const u64 before = sum_before(s < last ? raw_offsets[s] : 0, room, total);
    if (s < last) raw_offsets[s] = end + before;
    end += total;
  }
  if (last == num_segments && threadIdx.x == 0) raw_offsets[num_segments] = end;
}

// One thread block a table, which also has as many blocks' segments as the others to place.
extern "C" __global__ void __launch_bounds__(kThreads)
make_rans_tables(const u32* counts, const uint2* block_sums, u32 num_segments, u32 group_shift, u32 spread, uint4* entries,
                 u8* packed, u32* packed_bytes, u32* block_tables, const u32* block_areas, u64* raw_offsets) {
  __shared__ Groups groups;
  const u32 t = blockIdx.x, num_tables = gridDim.x, num_blocks = (num_segments + kWarps - 1) / kWarps;
  const u32 num_members = find_members(t, num_tables, group_shift, num_blocks, block_sums, block_tables, groups);
  make_table(counts, groups.members, num_members, group_shift, num_blocks, spread, entries + 2 * kSymbols * t,
             packed + kPackedTableBytes * t, packed_bytes + t);
  place_areas(t * num_blocks / num_tables, (t + 1) * num_blocks / num_tables, num_segments, block_areas, raw_offsets);
}
