// The digest of every piece of a chunk or body. digest_pieces.cu comes first.

// One thread block a piece of 65,536 bytes. The length is read from `length_at` where that is not null. A last piece of
// at most 240 bytes is copied to `tail` (256 bytes) for the host to hash. Blocks past the end do nothing.
extern "C" __global__ void __launch_bounds__(kThreads)
piece_digests(const u8* source, const u64* length_at, u64 length, u64* digests, u8* tail) {
  __shared__ u64 sums[kMaxRounds][kLanes];
  if (length_at) length = *length_at;
  const u64 start = (u64)blockIdx.x * kPieceBytes;
  if (start >= length) return;
  const u8* piece = source + start;
  const u32 size = (u32)smaller(kPieceBytes, length - start);
  if (size <= kShortBytes) {
    if (threadIdx.x < size) tail[threadIdx.x] = piece[threadIdx.x];
    return;
  }
  NothingBeside beside;
  sum_piece(piece, size, sums, beside);
  __syncthreads();
  if (threadIdx.x >= kLanes) return;
  const u64 hash = finish_piece(piece, size, sums);
  if (threadIdx.x == 0) digests[blockIdx.x] = hash;
}
