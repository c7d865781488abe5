// What all kernels share: number types, conversions, warp primitives and the shape of KV pages.
// Includes nothing, so that NVRTC compiles it without any header. Every kernel takes one struct by
// value; its twin in Rust is `kernels/src/cuda/args.rs`. Tests compile the same text with g++ by
// `tests/cuda/emulation.h`, which defines ROOTSTOCK_EMULATED and the primitives of the hardware.

#ifndef ROOTSTOCK_PRELUDE
#define ROOTSTOCK_PRELUDE
typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef ROOTSTOCK_EMULATED
#define DEVICE [[maybe_unused]] static __device__ __forceinline__
#define KERNEL(name, Args, ...) \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__) name(const Args a)
extern __shared__ uint4 dynamic_shared_memory[];
#define DYNAMIC_SHARED ((void*)dynamic_shared_memory)
#define INFINITE __int_as_float(0x7f800000)

DEVICE float f16_to_f32(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
DEVICE u16 f32_to_f16(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
DEVICE u16 f32_to_bf16(float f) {
    u16 h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
// c += a b for 16 rows, 8 columns, 16 deep; fragments as in the PTX manual, "mma.m16n8k16".
DEVICE void mma_f16(float c[4], const u32 a[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_bf16(float c[4], const u32 a[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Two 8x8 matrices of 16-bit elements from shared memory, each transposed; lanes 0 to 15 give the
// addresses of their rows.
DEVICE void load_transposed(u32& r0, u32& r1, const u16* row) {
    u32 at = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r0), "=r"(r1)
                 : "r"(at)
                 : "memory");
}
#endif

DEVICE float bits_f32(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 f32_bits(float f) { return __float_as_uint(f); }
DEVICE float bf16_to_f32(u16 h) { return bits_f32((u32)h << 16); }

// 8-bit float with 4 bits of exponent and 3 of fraction (the "fn" kind: no infinity, 448 is the
// largest). The bits are those of a half with another bias, so a product by 256 is exact.
DEVICE float e4m3_to_f32(u8 b) {
    u16 h = (u16)((b & 0x80) << 8 | (b & 0x7f) << 7);
    return (b & 0x7f) == 0x7f ? bits_f32(0x7fc00000) : f16_to_f32(h) * 256.0f;
}
// To nearest, ties to even; larger than 448 becomes 448.
DEVICE u8 f32_to_e4m3(float f) {
    u32 sign = f32_bits(f) >> 24 & 0x80;
    float size = fabsf(f);
    if (!(size == size)) return (u8)(sign | 0x7f);
    if (size >= 448.0f) return (u8)(sign | 0x7e);
    // Below 2^-6 the step is 2^-9: rounding happens by the addition.
    if (size < 0.015625f) return (u8)(sign | (f32_bits(size + 16384.0f) - f32_bits(16384.0f)));
    u32 bits = f32_bits(size);
    bits += 0x7ffff + (bits >> 20 & 1);
    return (u8)(sign | ((bits >> 20) - (120 << 3)));
}

DEVICE float warp_sum(float x) {
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
    return x;
}
DEVICE float warp_max(float x) {
    for (int step = 16; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
DEVICE u32 pack(u16 low, u16 high) { return (u32)low | (u32)high << 16; }

// Pages of one layer: [page][layer][k|v][kv_head][slot][head_dim]; strides in bytes, 64 bits wide.
// 8-bit pages have a scale a slot, a float, behind the slots of each head.
struct KvPages {
    u8* base;  // of the layer
    i64 page_bytes;
    i64 side_bytes;
    i64 head_bytes;
    u32 page_shift;  // page_tokens = 1 << page_shift
    u32 pages;       // scratch page included
};
DEVICE u8* kv_head_at(const KvPages& kv, u32 page, u32 side, u32 head) {
    return kv.base + (i64)page * kv.page_bytes + side * kv.side_bytes + head * kv.head_bytes;
}
#endif
