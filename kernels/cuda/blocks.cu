// Weights in the blocks of a file, by the numbers of GGUF: 2 Q4_0, 3 Q4_1, 6 Q5_0, 7 Q5_1, 8 Q8_0,
// 12 Q4_K, 13 Q5_K, 14 Q6_K and 20 IQ4_NL. On the device a matrix is taken apart: the bodies of all
// blocks (small numbers, a multiple of 16 bytes each), then their heads (scales and minima, and the
// fifth bits of Q5_0 and Q5_1). So a lane reads bodies in words of 8 or 16 bytes, and a matrix takes
// the bytes that it has in the file.
//
// A unit is 16 weights that lie in one word: two runs of 8 neighbors, GAP apart.

template <u32 TYPE> struct Format {
    static constexpr bool K = TYPE == 12 || TYPE == 13;
    static constexpr u32 BLOCK = K || TYPE == 14 ? 256 : 32;
    static constexpr u32 BODY =
        TYPE == 14 ? 192 : TYPE == 13 ? 160 : TYPE == 12 ? 128 : TYPE == 8 ? 32 : 16;
    static constexpr u32 HEAD =
        TYPE == 14 ? 18 : K ? 16 : TYPE == 7 ? 8 : TYPE == 6 ? 6 : TYPE == 3 ? 4 : 2;
    static constexpr u32 UNITS = BLOCK / 16;
    static constexpr u32 GAP = TYPE == 14 ? 64 : K ? 32 : TYPE == 8 ? 8 : 16;
};
// The first weight of a unit in its block.
template <u32 TYPE> DEVICE u32 unit_start(u32 unit) {
    if (TYPE == 14) return unit / 8 * 128 + unit % 8 / 4 * 32 + unit % 4 * 8;
    if (Format<TYPE>::K) return unit / 4 * 64 + unit % 4 * 8;
    return unit * (TYPE == 8 ? 16 : 8);
}
// The unit and the run that eight neighbors from `k` of a block on are.
template <u32 TYPE> DEVICE void find_run(u32 k, u32& unit, u32& run) {
    if (TYPE == 14) {
        unit = k / 128 * 8 + k % 64 / 32 * 4 + k % 32 / 8;
        run = k % 128 / 64;
    } else if (Format<TYPE>::K) {
        unit = k / 64 * 4 + k % 32 / 8;
        run = k % 64 / 32;
    } else if (TYPE == 8) {
        unit = k / 16;
        run = k % 16 / 8;
    } else {
        unit = k % 16 / 8;
        run = k / 16;
    }
}

// Floats of small numbers without a conversion: exact below 2^23.
DEVICE float small(u32 q) { return bits_f32(0x4b000000u | q) - 8388608.0f; }
DEVICE float small_signed(u32 byte) { return bits_f32(0x4b000000u | (byte ^ 0x80)) - 8388736.0f; }
DEVICE u32 byte_of(uint2 word, u32 j) { return (j < 4 ? word.x : word.y) >> 8 * (j % 4) & 0xff; }

// The sixteen values of IQ4_NL, a byte each, by a shift.
DEVICE float nonlinear(u32 q) {
    const u64 values = q < 8 ? 0xf6eaddcfbfad9881ull : 0x7159453526190d01ull;
    return small_signed((u32)(values >> 8 * (q % 8)) & 0xff);
}

struct Unit {
    uint2 low;
    uint2 high;  // of Q8_0 the second run, of Q5_K and Q6_K the high bits
};
template <u32 TYPE> DEVICE Unit unit_at(const u8* body, u32 unit) {
    if (TYPE == 8) {
        const uint4 all = *(const uint4*)(body + unit * 16);
        return Unit{{all.x, all.y}, {all.z, all.w}};
    }
    // Q5_K has its fifth bits before the rest.
    Unit out = {*(const uint2*)(body + (TYPE == 13 ? 32 : 0) + unit * 8), {0, 0}};
    if (TYPE == 13) out.high = *(const uint2*)(body + unit % 4 * 8);
    if (TYPE == 14) out.high = *(const uint2*)(body + 128 + unit / 8 * 32 + unit % 4 * 8);
    return out;
}
template <u32 TYPE>
DEVICE void run_of(const Unit& it, const u8* head, u32 unit, u32 run, float out[8]) {
    const u16* halves = (const u16*)head;
    float scale = f16_to_f32(halves[TYPE == 14 ? 8 : 0]), minimum = 0.0f;
    if (TYPE == 3 || TYPE == 7) minimum = f16_to_f32(halves[1]);
    const u32 part = unit / 4 * 2 + run;
    // Fifth bits of eight neighbors.
    u32 fifths = 0;
    if (TYPE == 6 || TYPE == 7) fifths = head[(TYPE == 6 ? 2 : 4) + run * 2 + unit];
    if (Format<TYPE>::K) {
        const u8* scales = head + 4;
        u32 factor, least;
        if (part < 4) {
            factor = scales[part] & 63;
            least = scales[part + 4] & 63;
        } else {
            factor = (scales[part + 4] & 15) | scales[part - 4] >> 6 << 4;
            least = scales[part + 4] >> 4 | scales[part] >> 6 << 4;
        }
        scale *= small(factor);
        minimum = f16_to_f32(halves[1]) * small(least);
    }
    const u32 quarter = unit % 8 / 4 + 2 * run;
    if (TYPE == 14) scale *= small_signed(head[unit / 8 * 8 + quarter * 2 + unit % 4 / 2]);
#pragma unroll
    for (u32 j = 0; j < 8; j++) {
        if (TYPE == 8) {
            out[j] = scale * small_signed(byte_of(run ? it.high : it.low, j));
            continue;
        }
        u32 q = byte_of(it.low, j) >> 4 * run & 15;
        if (TYPE == 6 || TYPE == 7) q |= (fifths >> j & 1) << 4;
        if (TYPE == 13) q |= (byte_of(it.high, j) >> part & 1) << 4;
        if (TYPE == 2) out[j] = scale * (small(q) - 8.0f);
        if (TYPE == 3 || TYPE == 7) out[j] = scale * small(q) + minimum;
        if (TYPE == 6) out[j] = scale * (small(q) - 16.0f);
        if (Format<TYPE>::K) out[j] = scale * small(q) - minimum;
        if (TYPE == 20) out[j] = scale * nonlinear(q);
        if (TYPE == 14) {
            const u32 high = byte_of(it.high, j) >> 2 * quarter & 3;
            out[j] = scale * (small(q | high << 4) - 32.0f);
        }
    }
}
// Where the heads of a matrix begin.
template <u32 TYPE> DEVICE const u8* heads_of(const void* weights, u32 rows, u32 cols) {
    using F = Format<TYPE>;
    return (const u8*)weights + (u64)rows * (cols / F::BLOCK) * F::BODY;
}
// Eight neighbors of a row, from a column that is a multiple of 8.
template <u32 TYPE>
DEVICE void eight_of(const void* weights, u32 rows, u32 cols, u64 row, u32 col, float out[8]) {
    using F = Format<TYPE>;
    const u64 block = row * (cols / F::BLOCK) + col / F::BLOCK;
    u32 unit, run;
    find_run<TYPE>(col % F::BLOCK, unit, run);
    const Unit it = unit_at<TYPE>((const u8*)weights + block * F::BODY, unit);
    run_of<TYPE>(it, heads_of<TYPE>(weights, rows, cols) + block * F::HEAD, unit, run, out);
}

// The blocks of a file into bodies and heads, two bytes a thread.
struct ApartArgs {
    const u16* blocks;
    u16* bodies;
    u16* heads;
    u64 count;
    u32 block;  // in words of two bytes, as the rest
    u32 body;
    u32 head_first;
};
KERNEL(take_apart, ApartArgs, 256) {
    const u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i >= a.count) return;
    const u64 which = i / a.block;
    const u32 at = (u32)(i % a.block), head = a.block - a.body;
    const bool of_head = a.head_first ? at < head : at >= a.body;
    if (of_head) a.heads[which * head + at - (a.head_first ? 0 : a.body)] = a.blocks[i];
    else a.bodies[which * a.body + at - (a.head_first ? head : 0)] = a.blocks[i];
}
