// The kernels of the rans encoder proper: one codes the segments of a chunk, one gathers the streams.

constexpr u32 kPreambleBytes = 32;
constexpr u32 kEnd = 0, kBodyBytes = 1, kRefused = 2;   // words of a report: see device_report.py

// Bytes of a body up to its raw region. All threads of a block call it together; thread t gets the bytes of the tables
// before table t.
__device__ u32 start_bytes(const u32* packed_bytes, u32 num_tables, u32 num_segments, u32* room, u32& tables_bytes,
                           u32& tables_before) {
  u32 total;
  tables_before = sum_before(threadIdx.x < num_tables ? packed_bytes[threadIdx.x] : 0, room, total);
  tables_bytes = round_up_16(total);
  return kPreambleBytes + tables_bytes + round_up_16(8 * num_segments);
}

template <u32 kUnitBytes>
__device__ void code_segments(const Chunk& chunk, const u32* infos, const u32* maps, const uint4* entries,
                              const u32* block_tables, u32 num_tables, const u32* packed_bytes, const u64* raw_offsets,
                              u8* body, u8* slots, u32 slot_bytes, u64* directory, u32* stream_bytes,
                              u32* block_streams) {
  __shared__ Room room;
  const u32 table = block_tables[blockIdx.x];
  u32 unused, unused_too;
  const u32 start = start_bytes(packed_bytes, num_tables, chunk.num_segments, room.sums, unused, unused_too);
  if (start + raw_offsets[chunk.num_segments] >= chunk.raw_bytes) return;   // the chunk does not shrink
  const u32 lane = lane_of_thread(), s = chunk.segment();
  for (u32 i = threadIdx.x; i < 2 * kSymbols; i += kThreads)
    room.entries[i / kSymbols][i % kSymbols] = entries[2 * kSymbols * table + i];
  __syncthreads();
  u64 entry = 0;
  if (s < chunk.num_segments) {
    const u32 info = infos[s], kind = info % 4;
    Segment segment;
    segment.raw = chunk.raw + chunk.start_of(s);
    segment.bytes = chunk.bytes_of(s);
    segment.num_coded = coded_tiles(info);
    segment.num_fields = is_sparse(info) ? info >> kFieldsShift : 0;
    segment.map = lane < 8 ? maps[8 * s + lane] : 0;
    segment.mapped = info >> kMappedShift & 1;
    segment.area = body + start + raw_offsets[s] - (is_sparse(info) ? 0 : kCarriedBytes);
    u8* slot = slots + (u64)s * slot_bytes;
    if (kind == kConstant) {
      if (lane < 16) slot[lane] = lane < 8 && lane < segment.bytes ? segment.raw[lane] : 0;
      entry = 8 | kConstant << 20;
    } else if (kind == kCoded) {
      entry = code_by_flags<kUnitBytes>(segment, room, table, slot, info);
    }
  }
  const u32 num_bytes = (u32)entry & 0xFFFFF;
  if (lane == 0) {
    if (s < chunk.num_segments) directory[s] = entry, stream_bytes[s] = num_bytes;
    room.sums[threadIdx.x / kLanes] = round_up_16(num_bytes);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    u32 sum = 0;
    for (u32 w = 0; w < kWarps; ++w) sum += room.sums[w];
    block_streams[blockIdx.x] = sum;
  }
}

// As many thread blocks a multiprocessor as the registers suffice for.
#define DEFINE_ENCODER(SIZE)                                                                                     \
  extern "C" __global__ void __launch_bounds__(kThreads, SIZE == 2 ? 4 : SIZE == 4 ? 3 : 2) code_segments_##SIZE(   \
      const u8* raw, u64 raw_bytes, u32 segment_tiles, u32 num_segments, const u32* infos, const u32* maps,      \
      const uint4* entries, const u32* block_tables, u32 num_tables, const u32* packed_bytes,                    \
      const u64* raw_offsets, u8* body, u8* slots, u32 slot_bytes, u64* directory, u32* stream_bytes,            \
      u32* block_streams) {                                                                                      \
    code_segments<SIZE>({raw, raw_bytes, segment_tiles, num_segments}, infos, maps, entries, block_tables,       \
                        num_tables, packed_bytes, raw_offsets, body, slots, slot_bytes, directory, stream_bytes, \
                        block_streams);                                                                          \
  }

DEFINE_ENCODER(1)
DEFINE_ENCODER(2)
DEFINE_ENCODER(4)
DEFINE_ENCODER(8)

__device__ __forceinline__ void copy_stream(uint4* to, const uint4* from, u32 num_vectors) {   // by one warp
  constexpr u32 kInFlight = 6;
  for (u32 base = lane_of_thread(); base < num_vectors; base += kLanes * kInFlight) {
    uint4 held[kInFlight];
#pragma unroll
    for (u32 i = 0; i < kInFlight; ++i)
      if (base + i * kLanes < num_vectors) held[i] = from[base + i * kLanes];
#pragma unroll
    for (u32 i = 0; i < kInFlight; ++i)
      if (base + i * kLanes < num_vectors) to[base + i * kLanes] = held[i];
  }
}

// Puts streams, directory, tables and preamble into the body and ends the report. A warp a segment. Nothing is written
// behind raw_bytes, rounded up to 16; report[kBodyBytes] becomes 0 where the body is not shorter than the chunk.
extern "C" __global__ void __launch_bounds__(kThreads)
gather_streams(u64* report, u8* body, u64 raw_bytes, u32 segment_tiles, u32 num_segments, u32 word_type,
               const u8* packed, const u32* packed_bytes, u32 num_tables, const u64* directory, const u32* stream_bytes,
               const u32* block_streams, const u64* raw_offsets, const u8* slots, u32 slot_bytes) {
  __shared__ u32 room[kWarps], sizes[kWarps];
  __shared__ u64 wide_room[kWarps];
  __shared__ u32 table_at;
  u32 tables_bytes, tables_before;
  const u32 start = start_bytes(packed_bytes, num_tables, num_segments, room, tables_bytes, tables_before);
  if (threadIdx.x == blockIdx.x) table_at = tables_before;   // read behind the next sum
  const u64 region = start + raw_offsets[num_segments];
  const Chunk chunk = {body, raw_bytes, segment_tiles, num_segments};
  const u32 b = blockIdx.x, s = chunk.segment(), lane = lane_of_thread(), warp = threadIdx.x / kLanes;
  const bool is_last = b == gridDim.x - 1;
  if (region >= raw_bytes) {
    if (is_last && threadIdx.x < 3) report[threadIdx.x] = 0;
    return;
  }
  const u32 size = s < num_segments ? round_up_16(stream_bytes[s]) : 0;
  if (lane == 0) sizes[warp] = size;
  u64 at = region + sum_of_block(block_streams, b, wide_room);   // has a barrier
  for (u32 w = 0; w < warp; ++w) at += sizes[w];
  if (s < num_segments) {
    const uint4* from = reinterpret_cast<const uint4*>(slots + (u64)s * slot_bytes);
    if (at + size < raw_bytes) copy_stream(reinterpret_cast<uint4*>(body + at), from, size / 16);
    at += size;
    u64* entries = reinterpret_cast<u64*>(body + kPreambleBytes + tables_bytes);
    if (lane == 0) entries[s] = directory[s];
    if (lane == 0 && s == num_segments - 1 && num_segments % 2) entries[num_segments] = 0;
  }
  if (b < num_tables) {
    const u16* from = reinterpret_cast<const u16*>(packed + kPackedTableBytes * b);
    u16* to = reinterpret_cast<u16*>(body + kPreambleBytes + table_at);
    for (u32 i = threadIdx.x; i < packed_bytes[b] / 2; i += kThreads) to[i] = from[i];
    const u32 end = table_at + packed_bytes[b];
    if (b == num_tables - 1 && threadIdx.x < 16 && end + threadIdx.x < tables_bytes)
      body[kPreambleBytes + end + threadIdx.x] = 0;
  }
  if (s == num_segments - 1 && lane == 0) {
    u32* preamble = reinterpret_cast<u32*>(body);
    preamble[0] = 1 | kLog2Sum << 8 | word_type << 16;
    preamble[1] = segment_tiles | num_tables << 16;
    preamble[2] = num_segments;
    preamble[3] = tables_bytes;
    reinterpret_cast<u64*>(body)[2] = region - start;
    reinterpret_cast<u64*>(body)[3] = at - region;
    report[kEnd] = at;
    report[kBodyBytes] = at < raw_bytes ? at : 0;
    report[kRefused] = 0;
  }
}
