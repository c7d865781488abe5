// Weight formats of GGUF files to plain floats, one element a thread. Types have the numbers of
// the files; the values are those of the CPU's `dequantize`, before they are rounded to the output.

struct DequantizeArgs {
    const u8* blocks;
    void* out;
    u64 count;
    u32 type;
    u32 out_type;  // 0 f32, 1 f16, 2 bf16
};

DEVICE float half_at(const u8* at) { return f16_to_f32((u16)(at[0] | at[1] << 8)); }
// Element `i` of 32 whose low nibbles are the first 16.
DEVICE u32 nibble(const u8* packed, u32 i) {
    return i < 16 ? packed[i] & 15 : packed[i - 16] >> 4;
}
DEVICE u32 fifth_bit(const u8* bits, u32 i) { return (bits[i / 8] >> i % 8 & 1) << 4; }

// Q4_K and Q5_K: parts of 32 with 6 bits each of scale and minimum.
DEVICE float eight_parts(const u8* block, const u8* fifths, const u8* packed, u32 i) {
    const u32 part = i / 32, at = i % 32;
    const u8* scales = block + 4;
    u32 scale, minimum;
    if (part < 4) {
        scale = scales[part] & 63;
        minimum = scales[part + 4] & 63;
    } else {
        scale = (scales[part + 4] & 15) | scales[part - 4] >> 6 << 4;
        minimum = scales[part + 4] >> 4 | scales[part] >> 6 << 4;
    }
    const u8 byte = packed[part / 2 * 32 + at];
    u32 q = part % 2 == 0 ? byte & 15 : byte >> 4;
    if (fifths) q |= (fifths[at] >> part & 1) << 4;
    return half_at(block) * (float)scale * (float)q - half_at(block + 2) * (float)minimum;
}
DEVICE float six_bits(const u8* block, u32 i) {
    const u32 half = i / 128, run = i % 128 / 32, at = i % 32;
    const u8 byte = block[half * 64 + run % 2 * 32 + at];
    const u32 low = run < 2 ? byte & 15 : byte >> 4;
    const u32 high = block[128 + half * 32 + at] >> 2 * run & 3;
    const float scale = (float)(i8)block[192 + i / 16];
    return half_at(block + 208) * scale * ((float)(low | high << 4) - 32.0f);
}
DEVICE float nonlinear(u32 q) {
    const i8 values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                           1,    13,   25,  38,  53,  69,  89,  113};
    return (float)values[q];
}

DEVICE float dequantized(const u8* blocks, u32 type, u64 index) {
    const u32 i = index % 32, k = index % 256;
    switch (type) {
        case 0: return ((const float*)blocks)[index];
        case 1: return f16_to_f32(((const u16*)blocks)[index]);
        case 30: return bf16_to_f32(((const u16*)blocks)[index]);
        case 2: {
            const u8* b = blocks + index / 32 * 18;
            return half_at(b) * ((float)nibble(b + 2, i) - 8.0f);
        }
        case 3: {
            const u8* b = blocks + index / 32 * 20;
            return half_at(b) * (float)nibble(b + 4, i) + half_at(b + 2);
        }
        case 6: {
            const u8* b = blocks + index / 32 * 22;
            return half_at(b) * ((float)(nibble(b + 6, i) | fifth_bit(b + 2, i)) - 16.0f);
        }
        case 7: {
            const u8* b = blocks + index / 32 * 24;
            return half_at(b) * (float)(nibble(b + 8, i) | fifth_bit(b + 4, i)) + half_at(b + 2);
        }
        case 8: {
            const u8* b = blocks + index / 32 * 34;
            return half_at(b) * (float)(i8)b[2 + i];
        }
        case 12: {
            const u8* b = blocks + index / 256 * 144;
            return eight_parts(b, nullptr, b + 16, k);
        }
        case 13: {
            const u8* b = blocks + index / 256 * 176;
            return eight_parts(b, b + 16, b + 48, k);
        }
        case 14: return six_bits(blocks + index / 256 * 210, k);
        default: {
            const u8* b = blocks + index / 32 * 18;
            return half_at(b) * nonlinear(nibble(b + 2, i));
        }
    }
}
KERNEL(dequantize, DequantizeArgs, 256) {
    const u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i >= a.count) return;
    const float value = dequantized(a.blocks, a.type, i);
    if (a.out_type == 0) ((float*)a.out)[i] = value;
    else ((u16*)a.out)[i] = a.out_type == 1 ? f32_to_f16(value) : f32_to_bf16(value);
}
