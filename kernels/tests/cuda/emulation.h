// Runs CUDA kernel source on the CPU. One fiber per CUDA thread of a block, blocks one after
// another; barriers and warp operations are where fibers change. What it checks: a barrier that
// part of a block reaches, a warp operation that part of a warp reaches, shared memory that is read
// before it is written (filled with NaN before each block), and with AddressSanitizer every access
// outside of an allocation. EMULATION_SEED turns the order of the warps. Tensor-core fragments are
// laid out as the PTX manual says. x86-64 System V, C++17, no packages.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>
#include <sys/mman.h>

#define ROOTSTOCK_EMULATED
#define __forceinline__ inline
#define __shared__ __attribute__((section("emulated_shared"))) static
#define DEVICE [[maybe_unused]] static inline
// The machinery itself is not what the sanitizers are to look at.
#define UNCHECKED __attribute__((no_sanitize("address", "undefined")))
struct Dim { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) float4 { float x, y, z, w; };
extern "C" {
extern char __start_emulated_shared[] __attribute__((weak));
extern char __stop_emulated_shared[] __attribute__((weak));
void emulation_switch(void** save, void* to);
}
namespace emulation {
enum Wait { RUNS, BLOCK, WARP };
struct Fiber { void* sp; Dim thread; bool done; Wait wait; unsigned turn; char* stack; };
struct Lane { uint64_t words[8]; };
struct State {
    std::vector<Fiber> fibers;
    unsigned current, count;
    void* main_sp;
    char* dynamic;
    size_t dynamic_bytes;
    std::function<void()> body;
    // Two for a thread: what a warp gives is read while the next is given.
    std::vector<Lane> lanes[2];
    Dim thread, block, block_dim, grid_dim;
    const char* kernel;
};
__attribute__((visibility("hidden"))) inline State the_state;
UNCHECKED inline State& state() { return the_state; }
[[noreturn]] inline void die(const char* what) {
    State& s = state();
    fprintf(stderr, "emulation: %s (%s, block %u,%u,%u thread %u)\n", what, s.kernel, s.block.x,
            s.block.y, s.block.z, s.current);
    abort();
}
#ifdef EMULATION_MAIN
asm(R"(
.text
.globl emulation_switch
emulation_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi); movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
#endif
UNCHECKED inline void pause() {
    State& s = state();
    emulation_switch(&s.fibers[s.current].sp, s.main_sp);
}
UNCHECKED inline void enter() {
    state().body();
    state().fibers[state().current].done = true;
    pause();
    abort();
}
UNCHECKED inline void resume(unsigned index) {
    State& s = state();
    s.current = index;
    s.thread = s.fibers[index].thread;
    emulation_switch(&s.main_sp, s.fibers[index].sp);
}
inline unsigned seed() {
    static unsigned value = getenv("EMULATION_SEED") ? atoi(getenv("EMULATION_SEED")) : 0;
    return value;
}
constexpr size_t STACK = 256 << 10;
UNCHECKED inline void run_block(unsigned n) {
    State& s = state();
    while (s.fibers.size() < n) {
        Fiber fiber{};
        fiber.stack = (char*)mmap(nullptr, STACK, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (fiber.stack == MAP_FAILED) die("no stack");
        s.fibers.push_back(fiber);
    }
    s.count = n;
    for (auto& lanes : s.lanes) lanes.resize((n + 31) / 32 * 32);
    if (__start_emulated_shared)
        memset(__start_emulated_shared, 0xff, __stop_emulated_shared - __start_emulated_shared);
    if (s.dynamic_bytes) memset(s.dynamic, 0xff, s.dynamic_bytes);
    for (unsigned i = 0; i < n; i++) {
        Fiber& fiber = s.fibers[i];
        fiber.done = false;
        fiber.wait = RUNS;
        fiber.turn = 0;
        fiber.thread = {i % s.block_dim.x, i / s.block_dim.x % s.block_dim.y,
                        i / (s.block_dim.x * s.block_dim.y)};
        void** sp = (void**)(fiber.stack + STACK - 16);
        *--sp = nullptr;
        *--sp = (void*)enter;
        for (int k = 0; k < 6; k++) *--sp = nullptr;
        fiber.sp = sp;
    }
    const unsigned warps = (n + 31) / 32, turn = seed() % warps;
    const bool backwards = seed() / warps & 1;
    for (;;) {
        unsigned done = 0, waiting = 0;
        for (unsigned q = 0; q < warps; q++) {
            const unsigned first = ((backwards ? warps - 1 - q : q) + turn) % warps * 32;
            const unsigned end = std::min(first + 32, n);
            for (;;) {
                for (unsigned i = first; i < end; i++)
                    if (!s.fibers[i].done && s.fibers[i].wait == RUNS) resume(i);
                unsigned at_warp = 0, ended = 0, at_block = 0;
                for (unsigned i = first; i < end; i++) {
                    ended += s.fibers[i].done;
                    if (s.fibers[i].done) continue;
                    at_warp += s.fibers[i].wait == WARP;
                    at_block += s.fibers[i].wait == BLOCK;
                }
                if (at_warp == 0) { done += ended; waiting += at_block; break; }
                if (at_warp != end - first) die("a part of the warp reached a warp operation");
                for (unsigned i = first; i < end; i++) s.fibers[i].wait = RUNS;
            }
        }
        if (done == n) break;
        if (done) die("a barrier after some threads returned");
        if (waiting != n) die("deadlock");
        for (unsigned i = 0; i < n; i++) s.fibers[i].wait = RUNS;
    }
}
UNCHECKED inline void wait(Wait kind) {
    state().fibers[state().current].wait = kind;
    pause();
}
// What every lane of the warp gives, from its first lane on. A lane that is two exchanges ahead
// of another one does not exist, so two places a lane are enough.
template <class T> UNCHECKED const Lane* exchange(const T& mine) {
    static_assert(sizeof(T) <= sizeof(Lane));
    State& s = state();
    const unsigned current = s.current;
    Lane* lanes = s.lanes[s.fibers[current].turn++ & 1].data();
    __builtin_memcpy(&lanes[current], &mine, sizeof mine);
    wait(WARP);
    return lanes + (current & ~31u);
}
template <class T> UNCHECKED T given(const Lane* warp, unsigned lane) {
    T value;
    __builtin_memcpy(&value, &warp[lane], sizeof value);
    return value;
}
inline unsigned own_lane() { return state().current & 31u; }
struct Kernel { void (*run)(const void*); size_t bytes; };
inline std::map<std::string, std::map<std::string, Kernel>>& modules() {
    static std::map<std::string, std::map<std::string, Kernel>> all;
    return all;
}
struct Entry {
    Entry(const char* module, const char* name, Kernel kernel) { modules()[module][name] = kernel; }
};
inline void launch(const char* name, const Kernel& kernel, Dim grid, Dim block, size_t dynamic,
                   const void* args) {
    State& s = state();
    s.kernel = name;
    s.grid_dim = grid;
    s.block_dim = block;
    // Of its own, so that AddressSanitizer knows where it ends.
    std::unique_ptr<char, void (*)(void*)> memory(
        (char*)aligned_alloc(16, (dynamic + 15) / 16 * 16 + 16), free);
    s.dynamic = memory.get();
    s.dynamic_bytes = dynamic;
    s.body = [&kernel, args] { kernel.run(args); };
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                s.block = {x, y, z};
                run_block(block.x * block.y * block.z);
            }
}
}  // namespace emulation

#define KERNEL(name, Args, ...)                                                       \
    static void name(const Args a);                                                   \
    static emulation::Entry entry_##name(MODULE, #name, {[](const void* args) {       \
        Args copy;                                                                    \
        memcpy(&copy, args, sizeof copy);                                             \
        name(copy);                                                                   \
    }, sizeof(Args)});                                                                \
    static void name(const Args a)
#define DYNAMIC_SHARED ((void*)emulation::state().dynamic)
#define INFINITE INFINITY
#define threadIdx emulation::state().thread
#define blockIdx emulation::state().block
#define blockDim emulation::state().block_dim
#define gridDim emulation::state().grid_dim
inline void __syncthreads() { emulation::wait(emulation::BLOCK); }
inline void __syncwarp(unsigned = ~0u) { emulation::wait(emulation::WARP); }
template <class T> T __shfl_xor_sync(unsigned mask, T value, int step) {
    if (mask != ~0u) emulation::die("a shuffle of part of the warp");
    return emulation::given<T>(emulation::exchange(value), emulation::own_lane() ^ step);
}
template <class T> T __shfl_sync(unsigned mask, T value, int from) {
    if (mask != ~0u) emulation::die("a shuffle of part of the warp");
    return emulation::given<T>(emulation::exchange(value), from & 31);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned step) {
    if (mask != ~0u) emulation::die("a shuffle of part of the warp");
    const unsigned lane = emulation::own_lane();
    return emulation::given<T>(emulation::exchange(value), lane < step ? lane : lane - step);
}
template <class T> T min(T a, T b) { return a < b ? a : b; }
template <class T> T max(T a, T b) { return a > b ? a : b; }
inline float __expf(float x) { return expf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
inline unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }

inline float f16_to_f32(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 0x3ff;
    if (e == 0) {
        const float f = m * 0x1p-24f;
        return sign ? -f : f;
    }
    return __uint_as_float(sign | (e == 31 ? 0x7f800000 : (e + 112) << 23) | m << 13);
}
inline uint16_t f32_to_f16(float f) {
    uint32_t x = __float_as_uint(f);
    const uint32_t sign = x >> 16 & 0x8000;
    x &= 0x7fffffff;
    if (x >= 0x7f800000) return sign | 0x7c00 | (x > 0x7f800000 ? 0x200 : 0);
    if (x >= 0x477ff000) return sign | 0x7c00;
    if (x < 0x38800000)
        return sign | (__float_as_uint(__uint_as_float(x) + 0.5f) - 0x3f000000);
    x += 0xc8000fff + (x >> 13 & 1);
    return sign | x >> 13;
}
inline uint16_t f32_to_bf16(float f) {
    uint32_t x = __float_as_uint(f);
    if ((x & 0x7fffffff) > 0x7f800000) return x >> 16 | 0x40;
    return (x + 0x7fff + (x >> 16 & 1)) >> 16;
}

namespace emulation {
// What a lane holds of both sides, widened: a[word][half of the word], b[word][half].
struct Fragments { float a[4][2], b[2][2]; };
// The documented places: group g = lane / 4, t = lane % 4. a0: row g, k 2t; a1: row g + 8; a2 and
// a3: k + 8. b0: k 2t, column g; b1: k + 8. c0, c1: row g, columns 2t and 2t + 1; c2, c3: row g + 8.
template <float VALUE(uint16_t)>
UNCHECKED void mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
    const uint32_t b[2] = {b0, b1};
    Fragments mine;
    for (unsigned i = 0; i < 4; i++)
        for (unsigned half = 0; half < 2; half++)
            mine.a[i][half] = VALUE(uint16_t(a[i] >> 16 * half));
    for (unsigned i = 0; i < 2; i++)
        for (unsigned half = 0; half < 2; half++)
            mine.b[i][half] = VALUE(uint16_t(b[i] >> 16 * half));
    const Lane* warp = exchange(mine);
    const unsigned g = own_lane() / 4, t = own_lane() % 4;
    for (unsigned word = 0; word < 2; word++)
        for (unsigned holder = 0; holder < 4; holder++) {
            const Fragments row = given<Fragments>(warp, g * 4 + holder);
            const Fragments left = given<Fragments>(warp, 2 * t * 4 + holder);
            const Fragments right = given<Fragments>(warp, (2 * t + 1) * 4 + holder);
            for (unsigned half = 0; half < 2; half++) {
                const float low = row.a[word * 2][half], high = row.a[word * 2 + 1][half];
                c[0] += low * left.b[word][half];
                c[1] += low * right.b[word][half];
                c[2] += high * left.b[word][half];
                c[3] += high * right.b[word][half];
            }
        }
}
inline float wide(uint16_t h) { return __uint_as_float(uint32_t(h) << 16); }
}  // namespace emulation
inline void mma_f16(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
    emulation::mma<f16_to_f32>(c, a, b0, b1);
}
inline void mma_bf16(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
    emulation::mma<emulation::wide>(c, a, b0, b1);
}
// Register i of a lane holds elements 2t and 2t + 1 of column g of matrix i: transposed.
inline void load_transposed(uint32_t& r0, uint32_t& r1, const uint16_t* row) {
    if ((uintptr_t)row % 16) emulation::die("ldmatrix of a row that is not aligned to 16 bytes");
    const emulation::Lane* warp = emulation::exchange(row);
    const unsigned g = emulation::own_lane() / 4, t = emulation::own_lane() % 4;
    uint32_t out[2];
    for (unsigned i = 0; i < 2; i++) {
        const uint16_t low = emulation::given<const uint16_t*>(warp, i * 8 + 2 * t)[g];
        const uint16_t high = emulation::given<const uint16_t*>(warp, i * 8 + 2 * t + 1)[g];
        out[i] = low | uint32_t(high) << 16;
    }
    r0 = out[0];
    r1 = out[1];
}
