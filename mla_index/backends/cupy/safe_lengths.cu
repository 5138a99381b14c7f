// lengths = max(counts, 1), and the dummy slot 0 in column 0 of a row with nothing in it.
// Fixed when this is compiled, by -D: SLOT_BYTES, COUNT_BYTES (4 or 8).

typedef int int32;
typedef long long int64;

#if SLOT_BYTES == 8
typedef int64 slot_t;
#else
typedef int32 slot_t;
#endif

#if COUNT_BYTES == 8
typedef int64 count_t;
#else
typedef int32 count_t;
#endif

// One layout with launch.py: every field has 8 bytes, in this order.
struct Params {
    slot_t* slots;
    int64 slot_pitch;
    const count_t* counts;
    int64 counts_stride;
    count_t* lengths;
    int64 lengths_stride;
    int64 rows;
};

extern "C" __global__ void safe_lengths(const __grid_constant__ Params p) {
    const int64 row = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= p.rows) return;
    const count_t count = p.counts[row * p.counts_stride];
    p.lengths[row * p.lengths_stride] = count > 1 ? count : 1;
    if (count <= 0) p.slots[row * p.slot_pitch] = 0;
}
