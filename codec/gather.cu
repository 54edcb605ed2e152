// The gather of a body by its pieces, so that each is hashed while it is at hand. FRAME.md has the format.
//
// Continues digest.cu: kernel_files.py compiles the two as one text, with what that file says of both.

// The body's blocks, as append_blocks in blocks.cu placed them: offsets[i] is where block i starts in the body, always
// a multiple of 16. Its bytes lie in the planes or, if it is coded, in its candidate's slot.
constexpr u32 kCoded = 1;
constexpr u32 kPreambleBytes = 16, kKindShift = 30, kStoredMask = (1u << kKindShift) - 1;

struct Blocks {
  u8* body;
  const u64* offsets;
  u32 num_blocks;
  const u8* source;
  u64 stride;
  u32 block_bytes, per_plane;
  u8* slots;
  u64 slot_bytes;
  u32 coded_per_plane;
  bool clear;   // leave zeros in the slots

  __device__ __forceinline__ u32 entry(u32 i) const { return reinterpret_cast<const u32*>(body + kPreambleBytes)[i]; }
};

// How many blocks start at or before a position of the body. The threads of a warp look together, 32 at a time.
__device__ __forceinline__ u32 blocks_up_to(const Blocks& blocks, u64 position) {
  u32 low = 0, high = blocks.num_blocks;   // the answer is one of low … high
  while (low < high) {
    const u32 step = (high - low + 31) / 32, probe = low + (threadIdx.x % 32 + 1) * step - 1;
    low += step * __popc(__ballot_sync(0xFFFFFFFFu, probe < high && blocks.offsets[probe] <= position));
    high = (u32)smaller(high, low + step - 1);
  }
  return low;
}

// Where the bytes of the body from `begin` up to `next` come from: `from`, up to `end`, and zeros behind that.
struct Cursor {
  u32 next_block;   // the block that starts at `next`
  u64 begin, end, next;
  const u8* from;
  bool coded;

  // `below`: how many blocks start at or before the position. What is in front of all blocks is in the body already.
  __device__ __forceinline__ void enter(const Blocks& blocks, u32 below) {
    next_block = below;
    next = below < blocks.num_blocks ? blocks.offsets[below] : ~0ull;
    begin = 0, end = next, from = blocks.body, coded = false;
    if (below == 0) return;
    const u32 i = below - 1, entry = blocks.entry(i), plane = i / blocks.per_plane, j = i % blocks.per_plane;
    begin = blocks.offsets[i], end = begin + (entry & kStoredMask), coded = entry >> kKindShift == kCoded;
    from = coded ? blocks.slots + (u64)(plane * blocks.coded_per_plane + j) * blocks.slot_bytes
                 : blocks.source + plane * blocks.stride + (u64)j * blocks.block_bytes;
  }

  // Goes on to the block of a position that is not in front of the last one.
  __device__ __forceinline__ void advance(const Blocks& blocks, u64 position) {
    if (position < next) return;
    u32 below = next_block + 1;
    while (below < blocks.num_blocks && blocks.offsets[below] <= position) ++below;
    enter(blocks, below);
  }

  // Whether `num_bytes` from a position on are whole vectors of one block.
  __device__ __forceinline__ bool covers(u64 position, u32 num_bytes) const { return position + num_bytes <= end; }
};

constexpr u32 kStepBytes = kRoundsPerStep * kStripesPerRound * kStripeBytes;

// Where a thread's vectors of a step lie in its piece; load_rounds of digest.cu wants them so.
__device__ __forceinline__ u32 place_of(u32 first_round, u32 r, u32 half) {
  return stripe_of(first_round, r, half) * kStripeBytes + threadIdx.x % 4 * 16;
}

// A slot's bytes are set to zero once they are taken, by the thread that took them: no other one reads them.
__device__ __forceinline__ uint4 take_vector(const u8* from, bool clear) {
  const uint4 vector = *reinterpret_cast<const uint4*>(from);
  if (clear) *reinterpret_cast<uint4*>(const_cast<u8*>(from)) = make_uint4(0, 0, 0, 0);
  return vector;
}

// Brings a warp's step into the body and holds it as load_rounds does, where all of it comes from one block.
__device__ __forceinline__ void gather_step(const Blocks& blocks, const Cursor& cursor, u64 start, u32 first_round,
                                            uint4 (&held)[kRoundsPerStep][2]) {
  const u64 ahead = start - cursor.begin;   // wraps where the block begins inside the piece; the sum below does not
  const bool clear = blocks.clear && cursor.coded;
#pragma unroll
  for (u32 r = 0; r < kRoundsPerStep; ++r) {
#pragma unroll
    for (u32 half = 0; half < 2; ++half)
      held[r][half] = take_vector(cursor.from + (ahead + place_of(first_round, r, half)), clear);
  }
#pragma unroll
  for (u32 r = 0; r < kRoundsPerStep; ++r) {
#pragma unroll
    for (u32 half = 0; half < 2; ++half)
      *reinterpret_cast<uint4*>(blocks.body + start + place_of(first_round, r, half)) = held[r][half];
  }
}

// Brings a warp's step into the body, whatever it comes from. The thread that writes 16 bytes also hashes them, so it
// can read them back. The cursor is a copy: each thread goes its own way.
__device__ __forceinline__ void gather_mixed_step(const Blocks& blocks, Cursor cursor, u64 start, u32 size,
                                                  u32 first_round) {
  const u64 head = blocks.offsets[0];
#pragma unroll 1
  for (u32 v = 0; v < 2 * kRoundsPerStep; ++v) {
    const u32 place = place_of(first_round, v / 2, v % 2);
    const u64 position = start + place;
    if (place >= size) break;
    if (position < head) continue;   // append_blocks wrote it
    cursor.advance(blocks, position);
    const u8* from = cursor.from + (position - cursor.begin);
    const bool clear = blocks.clear && cursor.coded;
    uint4* target = reinterpret_cast<uint4*>(blocks.body + position);
    if (cursor.covers(position, 16)) {
      *target = take_vector(from, clear);
      continue;
    }
#pragma unroll 1
    for (u32 i = 0; i < 16; ++i) blocks.body[position + i] = position + i < cursor.end ? from[i] : 0;
    if (clear) *reinterpret_cast<uint4*>(const_cast<u8*>(from)) = make_uint4(0, 0, 0, 0);
  }
}

// Sets candidate k's slot to zero, if no piece did: the block is not in the body as nvCOMP coded it.
__device__ void clear_slot(const Blocks& blocks, u32 k, u64 length, const u64* coded_bytes, const int* statuses) {
  const u32 i = k / blocks.coded_per_plane * blocks.per_plane + k % blocks.coded_per_plane;
  if (length && blocks.entry(i) >> kKindShift == kCoded) return;
  u64 written = blocks.slot_bytes;   // as far as one knows
  if (statuses[k] == 0 && coded_bytes[k]) written = smaller(written, (coded_bytes[k] + 15) & ~15ull);
  uint4* slot = reinterpret_cast<uint4*>(blocks.slots + k * blocks.slot_bytes);
  for (u64 v = threadIdx.x; v < written / 16; v += kThreads) slot[v] = make_uint4(0, 0, 0, 0);
}

// gather_blocks of blocks.cu and piece_digests of the body in one, for chunks of a single batch: each byte is read once.
// A thread block a piece; the body's length, a multiple of 16 and 0 if the body is not used, is read from `length_at`.
// With `clear`, as many thread blocks more as there are candidates: what nvCOMP wrote into the slots is zero afterwards.
extern "C" __global__ void __launch_bounds__(kThreads)
gather_and_digest(u8* body, const u64* length_at, u64* digests, u8* tail, u32 num_pieces, u32 num_blocks,
                  const u64* offsets, const u8* source, u64 stride, u32 block_bytes, u32 per_plane, u8* slots,
                  u64 slot_bytes, u32 coded_per_plane, u32 clear, const u64* coded_bytes, const int* statuses) {
  __shared__ u64 sums[kMaxRounds][kLanes];
  const Blocks blocks = {body,  offsets,    num_blocks,      source,    stride, block_bytes, per_plane,
                         slots, slot_bytes, coded_per_plane, clear != 0};
  const u64 length = *length_at, start = (u64)blockIdx.x * kPieceBytes;
  if (blockIdx.x >= num_pieces) {
    clear_slot(blocks, blockIdx.x - num_pieces, length, coded_bytes, statuses);
    return;
  }
  if (start >= length) return;
  const u32 size = (u32)smaller(kPieceBytes, length - start), num_stripes = (size - 1) / kStripeBytes;
  const u8* piece = body + start;
  u64 keys[2][2];
  load_keys(keys);
  const u32 begin = threadIdx.x / 32 * kRoundsPerWarp, first_byte = begin * kStripesPerRound * kStripeBytes;
  Cursor cursor;   // the same in all threads of a warp
  if (first_byte < size) cursor.enter(blocks, blocks_up_to(blocks, start + first_byte));
#pragma unroll 1
  for (u32 round = begin; round < begin + kRoundsPerWarp; round += kRoundsPerStep) {
    const u32 step = round * kStripesPerRound * kStripeBytes;
    if (step >= size) break;
    uint4 held[kRoundsPerStep][2];
    cursor.advance(blocks, start + step);
    if (step + kStepBytes <= size && start + step >= blocks.offsets[0] && cursor.covers(start + step, kStepBytes)) {
      gather_step(blocks, cursor, start, round, held);
    } else {
      gather_mixed_step(blocks, cursor, start, size, round);
      load_rounds(piece, round, num_stripes, held);
    }
    sum_rounds(held, round, num_stripes, keys, sums);
  }
  __syncthreads();
  if (size <= kShortBytes) {
    if (threadIdx.x < size) tail[threadIdx.x] = piece[threadIdx.x];
    return;
  }
  if (threadIdx.x >= kLanes) return;
  const u64 hash = finish_piece(piece, size, sums);
  if (threadIdx.x == 0) digests[blockIdx.x] = hash;
}
