// remap and dcp_filter, one row of the result at a time.
//
// Fixed when this is compiled, by -D (variants.py): TOKEN_BYTES, TABLE_BYTES, SLOT_BYTES (4 or 8);
// BLOCK_SIZE, DCP_SIZE, DCP_INTERLEAVE; COMPACT, COUNTS, SAFE_LENGTHS, REQ_ID, REQUEST_ROWS,
// TOKEN_LIMITS, WORKSPACE (0 or 1); and the layout of the work:
//   ITEMS      entries that a thread handles in a tile, a multiple of 4;
//   WARP_ROWS  1: a row is one warp's, and a thread block has several; 0: a row is a block's;
//   ONE_TILE   1: no row is wider than a tile;
//   VECTOR     1: tokens and out are read and written 16 bytes at a time and the table is dense;
//              0: any strides and alignment, one entry at a time.
//
// A warp owns a segment of 32 * ITEMS neighbouring columns, as parts of 32 * PART: lane l has the
// columns [PART * l, PART * (l + 1)) of each part, so that both layouts read whole lines. The tile
// of a row is its warps' segments; a wider row walks its tiles with a running count.
//
// Numbers are exact or the entry is invalid. Tokens are compared as unsigned numbers, which makes
// a negative one too large; a row that is out ends at token 0. What goes into a product is compared
// too, so whatever wraps belongs to an invalid entry.

typedef int int32;
typedef unsigned int uint32;
typedef long long int64;
typedef unsigned long long uint64;

#if TOKEN_BYTES == 8
typedef int64 token_t;
typedef uint64 utoken_t;
#else
typedef int32 token_t;
typedef uint32 utoken_t;
#endif

#if TABLE_BYTES == 8
typedef int64 entry_t;
typedef uint64 uentry_t;
#else
typedef int32 entry_t;
typedef uint32 uentry_t;
#endif

#if SLOT_BYTES == 8
typedef int64 slot_t;
typedef uint64 uslot_t;
#else
typedef int32 slot_t;
typedef uint32 uslot_t;
#endif

#define PART (VECTOR ? 4 : 1)
#define PARTS (ITEMS / PART)
#define STEP (32 * PART)
#define SEGMENT (32 * ITEMS)
#define ALL_LANES 0xffffffffu

// A tensor of one index a row: int32 or int64 is told at run time, so that it makes no variants.
struct Column {
    const void* data;
    int64 stride;  // elements
    int64 bytes;   // 4 or 8
};

// One layout with launch.py: every field has 8 bytes, in this order.
struct Params {
    const token_t* tokens;
    int64 token_pitch;
    int64 token_step;
    slot_t* out;
    int64 out_pitch;
    const entry_t* table;
    int64 table_pitch;
    int64 table_step;
    int64 table_rows;
    int64 rows;
    int64 topk;
    Column req_id;
    int32* counts;
    int64 counts_stride;
    int32* lengths;
    int64 lengths_stride;
    uint64 token_end;  // tokens from here on have no column in the table
    uint64 entry_end;  // blocks from here on begin beyond the last slot
    int64 rank;
    int64 block_stride_rows;
    int64 last_slot;
    int64 pad;
    // Only with REQUEST_ROWS, TOKEN_LIMITS or WORKSPACE.
    Column request_rows;
    int64 num_request_rows;
    Column token_limits;
    Column ws_request_ids;
    Column ws_starts;
    int64 num_ws_starts;
    uint64 local_end;  // token numbers within a rank from here on have no column in the table
    int64 rank_stride;
    int64 last_ws_row;
};

// What a row of the result has to know. `end`: tokens from here on are invalid.
struct Row {
    utoken_t end;
    const entry_t* table;
    int64 ws_start;
    bool gathered;
};

__device__ __forceinline__ int64 at(const Column& column, int64 index) {
    const int64 place = index * column.stride;
    return column.bytes == 8 ? static_cast<const int64*>(column.data)[place]
                             : static_cast<const int32*>(column.data)[place];
}

__device__ __forceinline__ Row read_row(const Params& p, int64 index) {
    Row row = {static_cast<utoken_t>(p.token_end), p.table, 0, false};
#if TOKEN_LIMITS
    const int64 limit = at(p.token_limits, index);
    if (limit <= 0) {
        row.end = 0;
    } else if (static_cast<uint64>(limit) < row.end) {
        row.end = static_cast<utoken_t>(limit);
    }
#endif
#if WORKSPACE
    const int64 part = at(p.ws_request_ids, index);
    if (part >= 0) {
        row.gathered = true;
        if (part < p.num_ws_starts) {
            row.ws_start = at(p.ws_starts, part);
        } else {
            row.end = 0;
        }
        return row;
    }
#endif
#if REQ_ID
    int64 request = at(p.req_id, index);
#else
    int64 request = index;
#endif
#if REQUEST_ROWS
    request = request >= 0 && request < p.num_request_rows ? at(p.request_rows, request) : -1;
#endif
    if (request >= 0 && request < p.table_rows) {
        row.table += request * p.table_pitch;
    } else {
        row.end = 0;
    }
    return row;
}

// Owner and token number on that rank.
__device__ __forceinline__ void share(utoken_t token, utoken_t& owner, utoken_t& local) {
#if DCP_SIZE > 1
    const utoken_t group = token / DCP_INTERLEAVE;
    const utoken_t turn = group / DCP_SIZE;
    owner = group - turn * DCP_SIZE;
    local = turn * DCP_INTERLEAVE + (token - group * DCP_INTERLEAVE);
#else
    owner = 0;
    local = token;
#endif
}

// Slots of a thread's tokens through the block table; the result has a bit for each valid one.
// Every table entry is asked for before the first is used: the reads overlap.
__device__ __forceinline__ uint32 paged_slots(
    const Params& p, const Row& row, const token_t (&tokens)[ITEMS], slot_t (&slots)[ITEMS]) {
    entry_t entries[ITEMS];
    uint32 offsets[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const utoken_t token = static_cast<utoken_t>(tokens[i]);
        utoken_t owner, local;
        share(token, owner, local);
        bool valid = token < row.end;
#if DCP_SIZE > 1
        valid = valid && owner == static_cast<utoken_t>(p.rank);
#endif
#if WORKSPACE
        valid = valid && local < p.local_end;
#endif
        const utoken_t block = local / BLOCK_SIZE;
        offsets[i] = static_cast<uint32>(local - block * BLOCK_SIZE);
        entries[i] = -1;
        if (valid) {
#if VECTOR
            entries[i] = row.table[block];
#else
            entries[i] = row.table[static_cast<int64>(block) * p.table_step];
#endif
        }
    }
    uint32 found = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        // Wraps only where the entry is negative or its block begins beyond the last slot.
        const uslot_t slot = static_cast<uslot_t>(entries[i]) *
                                 static_cast<uint32>(p.block_stride_rows) +
                             offsets[i];
        const bool valid = static_cast<uentry_t>(entries[i]) < static_cast<uentry_t>(p.entry_end) &&
                           slot <= static_cast<uslot_t>(p.last_slot);
        slots[i] = static_cast<slot_t>(slot);
        found |= (valid ? 1u : 0u) << i;
    }
    return found;
}

#if WORKSPACE
// The same for a row of the gathered workspace, where every rank's tokens are.
__device__ __forceinline__ uint32 workspace_slots(
    const Params& p, const Row& row, const token_t (&tokens)[ITEMS], slot_t (&slots)[ITEMS]) {
    uint32 found = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const utoken_t token = static_cast<utoken_t>(tokens[i]);
        utoken_t owner, local;
        share(token, owner, local);
        // The owner's part and the local number together stay below 2**63, because the caller has
        // size * rank_stride and the token below it. So the sum with the start, which may be
        // anything, wraps only where it is negative, and then to a number beyond every bound.
        const uint64 slot = static_cast<uint64>(owner) * static_cast<uint64>(p.rank_stride) +
                            static_cast<uint64>(row.ws_start) + local;
        const bool valid = token < row.end && local < p.local_end &&
                           slot < static_cast<uint64>(p.last_ws_row) + 1;
        slots[i] = static_cast<slot_t>(slot);
        found |= (valid ? 1u : 0u) << i;
    }
    return found;
}
#endif

__device__ __forceinline__ uint32 map_tokens(
    const Params& p, const Row& row, const token_t (&tokens)[ITEMS], slot_t (&slots)[ITEMS]) {
#if WORKSPACE
    if (row.gathered) return workspace_slots(p, row, tokens, slots);
#endif
    return paged_slots(p, row, tokens, slots);
}

// --- reading and writing ----------------------------------------------------------------------

// A thread's first column in the tile that starts at column `first`; its parts are STEP apart.
__device__ __forceinline__ uint32 first_column(uint32 first, uint32 warp, uint32 lane) {
    return first + warp * SEGMENT + lane * PART;
}

// A thread's tokens of the tile that starts at column `first`; -1 beyond the row. `out` may be the
// same memory: nothing here may be read after the tile was written.
__device__ __forceinline__ void load_tokens(
    const Params& p, int64 row, uint32 first, uint32 warp, uint32 lane, token_t (&tokens)[ITEMS]) {
    const uint32 mine = first_column(first, warp, lane);
    const token_t* source = p.tokens + row * p.token_pitch + mine * (VECTOR ? 1 : p.token_step);
    const int32 left = static_cast<int32>(p.topk) - static_cast<int32>(mine);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const int32 column = part * STEP;
        const bool inside = column < left;
#if VECTOR && TOKEN_BYTES == 4
        int4 four = make_int4(-1, -1, -1, -1);
        if (inside) four = __ldcs(reinterpret_cast<const int4*>(source + column));
        tokens[4 * part] = four.x;
        tokens[4 * part + 1] = four.y;
        tokens[4 * part + 2] = four.z;
        tokens[4 * part + 3] = four.w;
#elif VECTOR
        longlong2 low = make_longlong2(-1, -1), high = low;
        if (inside) {
            low = __ldcs(reinterpret_cast<const longlong2*>(source + column));
            high = __ldcs(reinterpret_cast<const longlong2*>(source + column + 2));
        }
        tokens[4 * part] = low.x;
        tokens[4 * part + 1] = low.y;
        tokens[4 * part + 2] = high.x;
        tokens[4 * part + 3] = high.y;
#else
        tokens[part] = inside ? source[column * p.token_step] : -1;
#endif
    }
}

// By intrinsics: an assignment of a vector may be compiled to four stores of a word. Streamed: the
// slots are read by another kernel, and the tokens and the table want the cache.
__device__ __forceinline__ void store_part(slot_t* target, const slot_t (&slots)[PART]) {
#if VECTOR && SLOT_BYTES == 4
    const int4 four = make_int4(slots[0], slots[1], slots[2], slots[3]);
    __stcs(reinterpret_cast<int4*>(target), four);
#elif VECTOR
    __stcs(reinterpret_cast<longlong2*>(target), make_longlong2(slots[0], slots[1]));
    __stcs(reinterpret_cast<longlong2*>(target) + 1, make_longlong2(slots[2], slots[3]));
#else
    *target = slots[0];
#endif
}

#if !COMPACT
// Each entry goes where its token was.
__device__ __forceinline__ void store_in_place(
    const Params& p, int64 row, uint32 first, uint32 warp, uint32 lane,
    const slot_t (&slots)[ITEMS], uint32 found) {
    const uint32 mine = first_column(first, warp, lane);
    const int32 left = static_cast<int32>(p.topk) - static_cast<int32>(mine);
    slot_t* target = p.out + row * p.out_pitch + mine;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const int32 column = part * STEP;
        if (column >= left) continue;
        slot_t values[PART];
#pragma unroll
        for (int j = 0; j < PART; ++j) {
            const int i = part * PART + j;
            values[j] = found >> i & 1 ? slots[i] : static_cast<slot_t>(p.pad);
        }
        store_part(target + column, values);
    }
}
#endif

// --- a row's threads together -------------------------------------------------------------------

#if COMPACT || COUNTS
__device__ __forceinline__ uint32 warp_sum(uint32 value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(ALL_LANES, value);
#else
    for (int distance = 16; distance > 0; distance >>= 1) {
        value += __shfl_xor_sync(ALL_LANES, value, distance);
    }
    return value;
#endif
}

__device__ __forceinline__ void row_barrier() {
#if WARP_ROWS
    __syncwarp();
#else
    __syncthreads();
#endif
}

#if !WARP_ROWS
__shared__ uint32 of_warp[32];
#endif

// Sum of each warp's `value` over the warps before this one, and over all. All threads call it,
// and a barrier must come before they call it again.
__device__ __forceinline__ void row_sum(
    uint32 value, uint32 warp, uint32 lane, uint32& before, uint32& total) {
#if WARP_ROWS
    row_barrier();
    before = 0;
    total = value;
#else
    if (lane == 0) of_warp[warp] = value;
    row_barrier();
    const uint32 one = lane < blockDim.x / 32 ? of_warp[lane] : 0;
    before = warp_sum(lane < warp ? one : 0);
    total = warp_sum(one);
#endif
}
#endif

#if COMPACT
// Where the compacted entries of a tile wait to be written in whole vectors. One word in each line
// is left out, so that threads whose entries are 4 apart meet different banks.
extern __shared__ int64 shared_memory[];

__device__ __forceinline__ uint32 spread(uint32 index) {
    return index + index / (128 / SLOT_BYTES);
}

// Valid entries of a warp's segment before this lane's share of each part, and in all.
__device__ __forceinline__ void segment_ranks(
    uint32 found, uint32 lane, uint32 (&before_part)[PARTS], uint32& in_segment) {
    in_segment = 0;
#if VECTOR
    // One scan for all parts: a part has 128 columns, so its count fits the byte that it is given.
    static_assert(PARTS <= 4, "a byte a part");
    uint32 mine = 0;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        mine |= __popc(found >> (part * PART) & ((1u << PART) - 1)) << (8 * part);
    }
    uint32 upto = mine;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const uint32 lower = __shfl_up_sync(ALL_LANES, upto, distance);
        if (lane >= distance) upto += lower;
    }
    const uint32 totals = __shfl_sync(ALL_LANES, upto, 31);
    const uint32 before = upto - mine;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        before_part[part] = in_segment + (before >> (8 * part) & 255);
        in_segment += totals >> (8 * part) & 255;
    }
#else
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const uint32 lanes = __ballot_sync(ALL_LANES, found >> part & 1);
        before_part[part] = in_segment + __popc(lanes & ((1u << lane) - 1));
        in_segment += __popc(lanes);
    }
#endif
}

// Put the valid entries of a tile behind the `done` that came before, in order, and write whole
// parts of the row; with the last tile also what is left and the padding.
//
// Two barriers a tile are enough: what one thread has read from shared memory before it arrives
// at row_sum's barrier, another may overwrite after it.
__device__ __forceinline__ void store_compact(
    const Params& p, int64 row, bool last, uint32 warp, uint32 lane, uint32 thread,
    uint32 threads, slot_t* shared, const slot_t (&slots)[ITEMS], uint32 found, uint32& done,
    slot_t& left) {
    uint32 before_part[PARTS];
    uint32 in_segment;
    segment_ranks(found, lane, before_part, in_segment);
    uint32 before_warp, in_tile;
    row_sum(in_segment, warp, lane, before_warp, in_tile);

    const uint32 carried = done & (PART - 1);
    if (thread < carried) shared[spread(thread)] = left;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        uint32 place = carried + before_warp + before_part[part];
#pragma unroll
        for (int j = 0; j < PART; ++j) {
            const uint32 valid = found >> (part * PART + j) & 1;
            if (valid) shared[spread(place)] = slots[part * PART + j];
            place += valid;
        }
    }
    uint32 filled = carried + in_tile;
    const uint32 start = done - carried;
    done += in_tile;
#if SAFE_LENGTHS
    if (last && done == 0) {  // the dummy slot of a row with nothing in it
        if (thread == 0) shared[0] = 0;
        filled = 1;
    }
#endif
    row_barrier();

    const uint32 whole = filled & ~static_cast<uint32>(PART - 1);
    slot_t* target = p.out + row * p.out_pitch + start;
    uint32 column = thread * PART;
    slot_t values[PART];
    for (; column < whole; column += threads * PART) {
        // A part starts at a multiple of its length and so lies in one line of shared memory.
        const slot_t* part = shared + spread(column);
#pragma unroll
        for (int j = 0; j < PART; ++j) values[j] = part[j];
        store_part(target + column, values);
    }
    if (last) {
        const uint32 width = static_cast<uint32>(p.topk) - start;
        for (; column < width; column += threads * PART) {
#pragma unroll
            for (int j = 0; j < PART; ++j) values[j] = static_cast<slot_t>(p.pad);
            if (column == whole) {
#pragma unroll
                for (int j = 0; j < PART - 1; ++j) {
                    if (whole + j < filled) values[j] = shared[spread(whole) + j];
                }
            }
            store_part(target + column, values);
        }
    }
    if (thread < filled - whole) left = shared[spread(whole + thread)];
}
#endif

// --- the kernel ---------------------------------------------------------------------------------

__device__ __forceinline__ void remap_row(
    const Params& p, int64 index, uint32 warp, uint32 lane, uint32 thread, uint32 threads) {
    const uint32 tile = threads * ITEMS;
    const uint32 step = tile * gridDim.y;  // more than one y only where no thread needs another
    uint32 first = tile * blockIdx.y;
    token_t tokens[ITEMS];
    load_tokens(p, index, first, warp, lane, tokens);
    const Row row = read_row(p, index);
#if COMPACT
    // Through a register that hides its origin: else the compiler makes the address anew for every
    // entry, in four instructions.
    uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared_memory));
    asm volatile("" : "+r"(base));
    slot_t* shared = static_cast<slot_t*>(__cvta_shared_to_generic(base));
#if WARP_ROWS
    shared += threadIdx.x / 32 * (SEGMENT + SEGMENT / (128 / SLOT_BYTES));
#endif
    uint32 done = 0;
    slot_t left = 0;
#elif COUNTS
    uint32 mine = 0;
#endif
    bool last;
    do {
        slot_t slots[ITEMS];
        const uint32 found = map_tokens(p, row, tokens, slots);
        const uint32 next = first + step;
        last = ONE_TILE || next >= static_cast<uint32>(p.topk);
        // The next tile's tokens come while this one is gathered and written.
        if (!last) load_tokens(p, index, next, warp, lane, tokens);
#if COMPACT
        store_compact(
            p, index, last, warp, lane, thread, threads, shared, slots, found, done, left);
#else
        store_in_place(p, index, first, warp, lane, slots, found);
#if COUNTS
        mine += __popc(found);
#endif
#endif
        first = next;
    } while (!last);

#if COUNTS && !COMPACT
    uint32 before_warp, done;
    row_sum(warp_sum(mine), warp, lane, before_warp, done);
#endif
#if COUNTS
    if (thread == 0) p.counts[index * p.counts_stride] = static_cast<int32>(done);
#endif
#if SAFE_LENGTHS
    if (thread == 0) p.lengths[index * p.lengths_stride] = done > 0 ? static_cast<int32>(done) : 1;
#endif
}

extern "C" __global__ void remap(const __grid_constant__ Params p) {
    const uint32 lane = threadIdx.x & 31;
#if WARP_ROWS
    const int64 rows = blockDim.x / 32;
    for (int64 row = blockIdx.x * rows + threadIdx.x / 32; row < p.rows; row += gridDim.x * rows) {
        remap_row(p, row, 0, lane, lane, 32);
    }
#else
    for (int64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
        remap_row(p, row, threadIdx.x / 32, lane, threadIdx.x, blockDim.x);
#if COUNTS && !COMPACT
        if (row + gridDim.x < p.rows) __syncthreads();
#endif
    }
#endif
}
