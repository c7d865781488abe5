// Kernels that know neither head width nor element type: norms, products, embedding, weight
// formats, copies of pages, sampling. Sums have one order for each output element, whatever the
// number of rows beside it, except that `product_tiles_*` has another than `product_rows_*`.

struct NormArgs {
    const float* x;  // [n][width]
    const float* weight;
    float* out;
    const u32* rows;  // out row i is of x row rows[i]; null: i
    u32 n;
    u32 width;
    float eps;
};
KERNEL(rms_norm, NormArgs, 256) {
    __shared__ float parts[8];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u64 from = (u64)(a.rows ? a.rows[blockIdx.x] : blockIdx.x) * a.width;
    const u64 to = (u64)blockIdx.x * a.width;
    float squares = 0.0f;
    for (u32 i = threadIdx.x; i < a.width; i += 256) squares += a.x[from + i] * a.x[from + i];
    squares = warp_sum(squares);
    if (lane == 0) parts[warp] = squares;
    __syncthreads();
    float total = 0.0f;
    for (u32 i = 0; i < 8; i++) total += parts[i];
    const float scale = 1.0f / sqrtf(total / a.width + a.eps);
    for (u32 i = threadIdx.x; i < a.width; i += 256)
        a.out[to + i] = a.x[from + i] * scale * a.weight[i];
}

struct SiluArgs {
    float* gate;
    const float* up;
    u64 count;
};
KERNEL(silu_mul, SiluArgs, 256) {
    const u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i >= a.count) return;
    const float x = a.gate[i];
    a.gate[i] = x / (1.0f + __expf(-x)) * a.up[i];
}

// Weights are 0 f32, 1 f16, 2 bf16.
DEVICE float weight_at(const void* weights, u32 type, u64 index) {
    if (type == 0) return ((const float*)weights)[index];
    const u16 bits = ((const u16*)weights)[index];
    return type == 1 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

struct EmbedArgs {
    const void* table;  // [vocab][width]
    const u32* tokens;
    float* out;
    u32 width;
    u32 type;
    u32 vocab;
};
KERNEL(embed, EmbedArgs, 256) {
    // A draw that failed gives no token; what its row computes is thrown away.
    const u64 row = min(a.tokens[blockIdx.x], a.vocab - 1);
    for (u32 i = threadIdx.x; i < a.width; i += 256)
        a.out[(u64)blockIdx.x * a.width + i] = weight_at(a.table, a.type, row * a.width + i);
}

// The same with the table in blocks, whose type is that of the file.
template <u32 TYPE> DEVICE void embed_row(const EmbedArgs& a, u64 row) {
    for (u32 i = threadIdx.x * 8; i < a.width; i += 256 * 8) {
        float wide[8];
        eight_of<TYPE>(a.table, a.vocab, a.width, row, i, wide);
        float* out = a.out + (u64)blockIdx.x * a.width + i;
#pragma unroll
        for (u32 j = 0; j < 8; j++) out[j] = wide[j];
    }
}
KERNEL(embed_blocks, EmbedArgs, 256) {
    const u64 row = min(a.tokens[blockIdx.x], a.vocab - 1);
    switch (a.type) {
        case 2: return embed_row<2>(a, row);
        case 3: return embed_row<3>(a, row);
        case 6: return embed_row<6>(a, row);
        case 7: return embed_row<7>(a, row);
        case 8: return embed_row<8>(a, row);
        case 12: return embed_row<12>(a, row);
        case 13: return embed_row<13>(a, row);
        case 20: return embed_row<20>(a, row);
        default: return embed_row<14>(a, row);
    }
}

struct ProductArgs {
    const void* weights;  // [rows][cols]
    const float* x;       // [n][cols]
    float* out;           // [n][rows]
    const float* bias;    // [rows], or null
    u32 n;
    u32 rows;
    u32 cols;  // a multiple of 8
    u32 add;   // to what `out` holds
};
DEVICE void product_out(const ProductArgs& a, u32 token, u32 row, float sum) {
    float* out = a.out + (u64)token * a.rows + row;
    if (a.bias) sum += a.bias[row];
    *out = a.add ? *out + sum : sum;
}

// A warp has two rows of weights and reads them once for eight rows of x. Grid: rows, tokens.
static constexpr u32 ROW_TOKENS = 8;
static constexpr u32 ROWS_A_WARP = 2;
template <u32 TYPE> DEVICE void eight_weights(const void* weights, u64 at, float out[8]) {
    if (TYPE == 0) {
        const uint4* from = (const uint4*)((const float*)weights + at);
        const uint4 low = from[0], high = from[1];
        const u32 words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (u32 i = 0; i < 8; i++) out[i] = bits_f32(words[i]);
        return;
    }
    const uint4 raw = *(const uint4*)((const u16*)weights + at);
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const u16 low = (u16)words[i], high = (u16)(words[i] >> 16);
        out[2 * i] = TYPE == 1 ? f16_to_f32(low) : bf16_to_f32(low);
        out[2 * i + 1] = TYPE == 1 ? f16_to_f32(high) : bf16_to_f32(high);
    }
}
template <u32 ROWS>
DEVICE void product_sums(const ProductArgs& a, float (&sums)[ROWS][ROW_TOKENS], u32 lane, u32 row,
                         u32 token, u32 tokens) {
#pragma unroll
    for (u32 r = 0; r < ROWS; r++)
#pragma unroll
        for (u32 i = 0; i < ROW_TOKENS; i++) {
            const float sum = warp_sum(sums[r][i]);
            if (lane == 0 && i < tokens && row + r < a.rows)
                product_out(a, token + i, row + r, sum);
        }
}
template <u32 TYPE> DEVICE void product_rows(const ProductArgs& a) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 row = (blockIdx.x * 4 + warp) * ROWS_A_WARP, token = blockIdx.y * ROW_TOKENS;
    if (row >= a.rows) return;
    const u32 tokens = min(ROW_TOKENS, a.n - token);
    float sums[ROWS_A_WARP][ROW_TOKENS];
#pragma unroll
    for (u32 r = 0; r < ROWS_A_WARP; r++)
#pragma unroll
        for (u32 i = 0; i < ROW_TOKENS; i++) sums[r][i] = 0.0f;
    for (u32 at = lane * 8; at < a.cols; at += 256) {
        float weights[ROWS_A_WARP][8];
#pragma unroll
        for (u32 r = 0; r < ROWS_A_WARP; r++) {
            const u64 which = min(row + r, a.rows - 1);
            eight_weights<TYPE>(a.weights, which * a.cols + at, weights[r]);
        }
#pragma unroll
        for (u32 i = 0; i < ROW_TOKENS; i++) {
            if (i >= tokens) continue;
            float x[8];
            eight_weights<0>(a.x, (u64)(token + i) * a.cols + at, x);
#pragma unroll
            for (u32 r = 0; r < ROWS_A_WARP; r++)
#pragma unroll
                for (u32 j = 0; j < 8; j++) sums[r][i] += weights[r][j] * x[j];
        }
    }
    product_sums(a, sums, lane, row, token, tokens);
}
KERNEL(product_rows_f32, ProductArgs, 128) { product_rows<0>(a); }
KERNEL(product_rows_f16, ProductArgs, 128) { product_rows<1>(a); }
KERNEL(product_rows_bf16, ProductArgs, 128) { product_rows<2>(a); }

// The same with weights in blocks: a lane has a unit of each row.
template <u32 TYPE> DEVICE void product_blocks(const ProductArgs& a) {
    using F = Format<TYPE>;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 row = (blockIdx.x * 4 + warp) * ROWS_A_WARP, token = blockIdx.y * ROW_TOKENS;
    if (row >= a.rows) return;
    const u32 tokens = min(ROW_TOKENS, a.n - token), units = a.cols / 16;
    const u8* heads = heads_of<TYPE>(a.weights, a.rows, a.cols);
    float sums[ROWS_A_WARP][ROW_TOKENS];
#pragma unroll
    for (u32 r = 0; r < ROWS_A_WARP; r++)
#pragma unroll
        for (u32 i = 0; i < ROW_TOKENS; i++) sums[r][i] = 0.0f;
    for (u32 at = lane; at < units; at += 32) {
        const u32 block = at / F::UNITS, unit = at % F::UNITS;
        float weights[ROWS_A_WARP][16];
#pragma unroll
        for (u32 r = 0; r < ROWS_A_WARP; r++) {
            const u64 which = (u64)min(row + r, a.rows - 1) * (a.cols / F::BLOCK) + block;
            const Unit it = unit_at<TYPE>((const u8*)a.weights + which * F::BODY, unit);
            run_of<TYPE>(it, heads + which * F::HEAD, unit, 0, weights[r]);
            run_of<TYPE>(it, heads + which * F::HEAD, unit, 1, weights[r] + 8);
        }
        const u64 column = block * F::BLOCK + unit_start<TYPE>(unit);
#pragma unroll
        for (u32 i = 0; i < ROW_TOKENS; i++) {
            if (i >= tokens) continue;
#pragma unroll
            for (u32 run = 0; run < 2; run++) {
                float x[8];
                eight_weights<0>(a.x, (u64)(token + i) * a.cols + column + run * F::GAP, x);
#pragma unroll
                for (u32 r = 0; r < ROWS_A_WARP; r++)
#pragma unroll
                    for (u32 j = 0; j < 8; j++) sums[r][i] += weights[r][run * 8 + j] * x[j];
            }
        }
    }
    product_sums(a, sums, lane, row, token, tokens);
}
KERNEL(product_rows_q4_0, ProductArgs, 128) { product_blocks<2>(a); }
KERNEL(product_rows_q4_1, ProductArgs, 128) { product_blocks<3>(a); }
KERNEL(product_rows_q5_0, ProductArgs, 128) { product_blocks<6>(a); }
KERNEL(product_rows_q5_1, ProductArgs, 128) { product_blocks<7>(a); }
KERNEL(product_rows_q8_0, ProductArgs, 128) { product_blocks<8>(a); }
KERNEL(product_rows_q4_k, ProductArgs, 128) { product_blocks<12>(a); }
KERNEL(product_rows_q5_k, ProductArgs, 128) { product_blocks<13>(a); }
KERNEL(product_rows_q6_k, ProductArgs, 128) { product_blocks<14>(a); }
KERNEL(product_rows_iq4_nl, ProductArgs, 128) { product_blocks<20>(a); }

// 64 tokens by 64 rows by tensor cores, 32 columns at a time; weights in blocks (BLOCKS: their
// type) become halves on the way. Grid: rows, tokens.
static constexpr u32 SIDE = 64;
static constexpr u32 DEPTH = 32;
static constexpr u32 DEPTH_PITCH = DEPTH + 8;
template <u32 BLOCKS> DEVICE uint4 eight_halves(const ProductArgs& a, u32 row, u32 col) {
    if constexpr (BLOCKS == 0) {
        return *(const uint4*)((const u16*)a.weights + (u64)row * a.cols + col);
    } else {
        float wide[8];
        eight_of<BLOCKS>(a.weights, a.rows, a.cols, row, col, wide);
        u32 words[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            words[i] = pack(f32_to_f16(wide[2 * i]), f32_to_f16(wide[2 * i + 1]));
        return uint4{words[0], words[1], words[2], words[3]};
    }
}
template <u32 TYPE, u32 BLOCKS = 0> DEVICE void product_tiles(const ProductArgs& a) {
    u16* x = (u16*)DYNAMIC_SHARED;
    u16* w = x + SIDE * DEPTH_PITCH;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const u32 row = blockIdx.x * SIDE, token = blockIdx.y * SIDE;
    float acc[SIDE / 8][4];
#pragma unroll
    for (u32 i = 0; i < SIDE / 8; i++)
        for (u32 j = 0; j < 4; j++) acc[i][j] = 0.0f;
    for (u32 begin = 0; begin < a.cols; begin += DEPTH) {
        __syncthreads();
        for (u32 item = threadIdx.x; item < SIDE * (DEPTH / 8); item += 128) {
            const u32 line = item / (DEPTH / 8), at = item % (DEPTH / 8) * 8, col = begin + at;
            uint4 weights = {0, 0, 0, 0};
            if (row + line < a.rows && col < a.cols)
                weights = eight_halves<BLOCKS>(a, row + line, col);
            *(uint4*)(w + line * DEPTH_PITCH + at) = weights;
            u32 words[4] = {0, 0, 0, 0};
            if (token + line < a.n && col < a.cols) {
                float wide[8];
                eight_weights<0>(a.x, (u64)(token + line) * a.cols + col, wide);
#pragma unroll
                for (u32 i = 0; i < 4; i++)
                    words[i] = TYPE == 1
                                   ? pack(f32_to_f16(wide[2 * i]), f32_to_f16(wide[2 * i + 1]))
                                   : pack(f32_to_bf16(wide[2 * i]), f32_to_bf16(wide[2 * i + 1]));
            }
            *(uint4*)(x + line * DEPTH_PITCH + at) = uint4{words[0], words[1], words[2], words[3]};
        }
        __syncthreads();
#pragma unroll
        for (u32 step = 0; step < DEPTH / 16; step++) {
            const u16* from = x + (warp * 16 + g) * DEPTH_PITCH + step * 16 + 2 * t;
            const u32 left[4] = {*(const u32*)from, *(const u32*)(from + 8 * DEPTH_PITCH),
                                 *(const u32*)(from + 8), *(const u32*)(from + 8 * DEPTH_PITCH + 8)};
#pragma unroll
            for (u32 i = 0; i < SIDE / 8; i++) {
                const u16* right = w + (i * 8 + g) * DEPTH_PITCH + step * 16 + 2 * t;
                if (TYPE == 1) mma_f16(acc[i], left, *(const u32*)right, *(const u32*)(right + 8));
                else mma_bf16(acc[i], left, *(const u32*)right, *(const u32*)(right + 8));
            }
        }
    }
#pragma unroll
    for (u32 i = 0; i < SIDE / 8; i++)
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            const u32 to = token + warp * 16 + g + j / 2 * 8, column = row + i * 8 + 2 * t + j % 2;
            if (to < a.n && column < a.rows) product_out(a, to, column, acc[i][j]);
        }
}
KERNEL(product_tiles_f16, ProductArgs, 128) { product_tiles<1>(a); }
KERNEL(product_tiles_bf16, ProductArgs, 128) { product_tiles<2>(a); }
KERNEL(product_tiles_q4_0, ProductArgs, 128) { product_tiles<1, 2>(a); }
KERNEL(product_tiles_q4_1, ProductArgs, 128) { product_tiles<1, 3>(a); }
KERNEL(product_tiles_q5_0, ProductArgs, 128) { product_tiles<1, 6>(a); }
KERNEL(product_tiles_q5_1, ProductArgs, 128) { product_tiles<1, 7>(a); }
KERNEL(product_tiles_q8_0, ProductArgs, 128) { product_tiles<1, 8>(a); }
KERNEL(product_tiles_q4_k, ProductArgs, 128) { product_tiles<1, 12>(a); }
KERNEL(product_tiles_q5_k, ProductArgs, 128) { product_tiles<1, 13>(a); }
KERNEL(product_tiles_q6_k, ProductArgs, 128) { product_tiles<1, 14>(a); }
KERNEL(product_tiles_iq4_nl, ProductArgs, 128) { product_tiles<1, 20>(a); }

// Copies of pages: whole layers of pages that lie apart, to one buffer without gaps and back.
struct PagesArgs {
    u8* arena;
    u8* packed;  // [count][bytes]
    const u32* pages;
    i64 page_bytes;
    i64 offset;  // of the first layer in a page
    i64 bytes;   // of all layers to copy; a multiple of 16, as all of these
    u32 count;
};
template <bool GATHER> DEVICE void move_pages(const PagesArgs& a) {
    const i64 vectors = a.bytes / 16;
    u8* apart = a.arena + (i64)a.pages[blockIdx.x] * a.page_bytes + a.offset;
    u8* packed = a.packed + (i64)blockIdx.x * a.bytes;
    const uint4* from = (const uint4*)(GATHER ? apart : packed);
    uint4* to = (uint4*)(GATHER ? packed : apart);
    for (i64 i = (i64)blockIdx.y * 256 + threadIdx.x; i < vectors; i += (i64)gridDim.y * 256)
        to[i] = from[i];
}
KERNEL(pages_gather, PagesArgs, 256) { move_pages<true>(a); }
KERNEL(pages_scatter, PagesArgs, 256) { move_pages<false>(a); }

// Tokens that an earlier step drew go to where this step reads them.
struct FeedArgs {
    u32* tokens;
    const u32* drawn;
    const uint2* pairs;  // to, from
    u32 count;
};
KERNEL(feed, FeedArgs, 256) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i < a.count) a.tokens[a.pairs[i].x] = a.drawn[a.pairs[i].y];
}

// Inputs in the type of 16-bit weights, for a library that multiplies equal types.
struct NarrowArgs {
    const float* x;
    u16* out;
    u64 count;  // a multiple of 8
    u32 type;   // 1 f16, 2 bf16
};
KERNEL(narrow, NarrowArgs, 256) {
    const u64 at = ((u64)blockIdx.x * 256 + threadIdx.x) * 8;
    if (at >= a.count) return;
    float wide[8];
    eight_weights<0>(a.x, at, wide);
    u32 words[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++)
        words[i] = a.type == 1 ? pack(f32_to_f16(wide[2 * i]), f32_to_f16(wide[2 * i + 1]))
                               : pack(f32_to_bf16(wide[2 * i]), f32_to_bf16(wide[2 * i + 1]));
    *(uint4*)(a.out + at) = uint4{words[0], words[1], words[2], words[3]};
}
