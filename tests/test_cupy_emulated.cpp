// Runs a kernel of the cupy backend on the CPU: every CUDA thread is a fibre of one OS thread, and
// waits at a barrier or a warp's vote until all have come. Compiled by test_cupy_emulated.py with
// the kernel's file as KERNEL and its name as FUNCTION.
//
// Warps take turns. Without a seed each goes one step at a time, in order; with one, a warp drawn
// by lot runs as far as it can while the others stand still, its lanes last to first: what a
// missing barrier leaves to chance comes out differently.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <ucontext.h>
#include <vector>

namespace {

struct Dim {
    unsigned x, y;
};
Dim threadIdx, blockIdx, blockDim, gridDim;

// --- fibres and meetings --------------------------------------------------------------------

constexpr size_t STACK = 64 * 1024;
struct Meeting;
struct Fibre {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK]};
    bool done;
    const Meeting* waits_for;
    unsigned round;
};
std::vector<std::unique_ptr<Fibre>> fibres;
ucontext_t scheduler;

[[noreturn]] void fail(const char* what) {
    std::fprintf(stderr, "emulated kernel: %s\n", what);
    std::abort();
}

struct Meeting {
    unsigned arrived = 0, round = 0, kind = 0;
    unsigned ballot = 0, sum = 0, old_ballot = 0, old_sum = 0;
    unsigned values[32] = {}, old_values[32] = {};

    void join(unsigned size, unsigned a_kind, unsigned lane, unsigned value) {
        if (arrived && kind != a_kind) fail("threads meet at different barriers or votes");
        kind = a_kind;
        ballot |= (value & 1) << lane;
        sum += value;
        if (lane < 32) values[lane] = value;
        const unsigned mine = round;
        if (++arrived == size) {
            old_ballot = ballot, old_sum = sum;
            std::copy(values, values + 32, old_values);
            arrived = ballot = sum = 0;
            ++round;
        }
        if (round != mine) return;
        Fibre& me = *fibres[threadIdx.x];
        me.waits_for = this, me.round = mine;
        swapcontext(&me.context, &scheduler);
    }
};
Meeting block_meeting;
std::vector<Meeting> warp_meetings;

Meeting& warp() { return warp_meetings[threadIdx.x / 32]; }
unsigned lane_of() { return threadIdx.x % 32; }

void __syncthreads() { block_meeting.join(blockDim.x, 1, 0, 0); }
void __syncwarp() { warp().join(32, 2, lane_of(), 0); }
unsigned __ballot_sync(unsigned, unsigned value) {
    warp().join(32, 3, lane_of(), value != 0);
    return warp().old_ballot;
}
unsigned __reduce_add_sync(unsigned, unsigned value) {
    warp().join(32, 4, lane_of(), value);
    return warp().old_sum;
}
unsigned __shfl_sync(unsigned, unsigned value, int lane) {
    warp().join(32, 5, lane_of(), value);
    return warp().old_values[lane];
}
unsigned __shfl_up_sync(unsigned, unsigned value, unsigned distance) {
    warp().join(32, 6, lane_of(), value);
    const unsigned lane = lane_of();
    return lane < distance ? value : warp().old_values[lane - distance];
}
unsigned __popc(unsigned value) { return __builtin_popcount(value); }

// --- what else the sources use ----------------------------------------------------------------

struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(16) longlong2 {
    long long x, y;
};
int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
longlong2 make_longlong2(long long x, long long y) { return {x, y}; }
template <class T>
T __ldcs(const T* from) {
    if (reinterpret_cast<uintptr_t>(from) % sizeof(T)) fail("a misaligned vector is read");
    return *from;
}
template <class T>
void __stcs(T* to, T value) {
    if (reinterpret_cast<uintptr_t>(to) % sizeof(T)) fail("a misaligned vector is written");
    *to = value;
}
template <class T>
T __ldg(const T* from) {
    return *from;
}
char* shared_window();
size_t __cvta_generic_to_shared(const void* address) {
    return static_cast<const char*>(address) - shared_window();
}
void* __cvta_shared_to_generic(size_t offset) { return shared_window() + offset; }

}  // namespace

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__
#define __grid_constant__
#define __CUDA_ARCH__ 900

#include KERNEL

constexpr size_t SHARED = 64 * 1024;
#if defined(COMPACT) && COMPACT
long long shared_memory[SHARED / 8];
#else
static long long shared_memory[SHARED / 8];
#endif

namespace {
char* shared_window() { return reinterpret_cast<char*>(shared_memory); }
}  // namespace

static const Params* parameters;

static void run_fibre() {
    const unsigned me = threadIdx.x;
    FUNCTION(*parameters);
    fibres[me]->done = true;
    swapcontext(&fibres[me]->context, &scheduler);
}

static bool can_run(const Fibre& fibre) {
    return !fibre.done && !(fibre.waits_for && fibre.waits_for->round == fibre.round);
}

// Let each lane of a warp that can run go on to where it has to wait; whether one could.
static bool step(unsigned first, unsigned threads, bool backwards) {
    bool ran = false;
    for (unsigned i = 0; i < 32; ++i) {
        const unsigned thread = first + (backwards ? 31 - i : i);
        if (thread >= threads || !can_run(*fibres[thread])) continue;
        threadIdx.x = thread;
        ran = true;
        swapcontext(&scheduler, &fibres[thread]->context);
    }
    return ran;
}

static void run_block(unsigned seed, size_t shared) {
    const unsigned threads = blockDim.x;
    const unsigned warps = (threads + 31) / 32;
    while (fibres.size() < threads) fibres.emplace_back(new Fibre);
    warp_meetings.assign(warps, Meeting{});
    block_meeting = Meeting{};
    std::memset(shared_memory, 0x5a, SHARED);
    for (unsigned i = 0; i < threads; ++i) {
        Fibre& fibre = *fibres[i];
        fibre.done = false;
        fibre.waits_for = nullptr;
        getcontext(&fibre.context);
        fibre.context.uc_stack.ss_sp = fibre.stack.get();
        fibre.context.uc_stack.ss_size = STACK;
        fibre.context.uc_link = nullptr;
        makecontext(&fibre.context, run_fibre, 0);
    }
    std::minstd_rand lot(seed + blockIdx.x);
    for (bool ran = true; ran;) {
        ran = false;
        const unsigned start = seed ? lot() % warps : 0;
        for (unsigned i = 0; i < warps; ++i) {
            const unsigned first = (start + i) % warps * 32;
            bool stepped = step(first, threads, seed != 0);
            ran |= stepped;
            if (!seed || !stepped) continue;
            while (step(first, threads, true)) {
            }
            break;  // to draw another warp
        }
    }
    for (unsigned i = 0; i < threads; ++i) {
        if (!fibres[i]->done) fail("threads wait for each other for ever");
    }
    const char* bytes = reinterpret_cast<const char*>(shared_memory);
    for (size_t i = shared; i < SHARED; ++i) {
        if (bytes[i] != 0x5a) fail("shared memory is written beyond what the launch asked for");
    }
}

extern "C" void emulate(
    const void* packed, unsigned grid_x, unsigned grid_y, unsigned block_x, unsigned shared,
    unsigned seed) {
    static Params copy;
    std::memcpy(static_cast<void*>(&copy), packed, sizeof copy);
    parameters = &copy;
    gridDim = {grid_x, grid_y};
    blockDim = {block_x, 1};
    for (unsigned y = 0; y < grid_y; ++y) {
        for (unsigned x = 0; x < grid_x; ++x) {
            blockIdx = {x, y};
            run_block(seed, shared);
        }
    }
}
