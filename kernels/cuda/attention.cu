// Attention over KV pages, for one head width (HEAD_DIM) and one element type (KV_TYPE: 0 f32,
// 1 f16, 2 bf16, 3 e4m3 and 4 int8 with a scale a slot). K and V of a step are stored first and
// read back in the type of the pages.
//
// Decode: a stream is a few lanes that hold one key or value in 16-byte parts. Streams of a block
// take tokens in turn, four at a time, and keep a softmax of their own; they are merged in order
// at the end, and so are the parts (splits) of a long context, by `attention_merge`. A token's
// result depends on the split length and on nothing else of its batch.
// Prefill: 64 queries of one head against tiles of keys, by tensor cores, as in FlashAttention-2
// (Dao 2023); tiles start at absolute positions, so that chunks change no bit.

static constexpr u32 DIM = HEAD_DIM;
static constexpr bool SCALED = KV_TYPE >= 3;
static constexpr u32 ELEMENT_BYTES = KV_TYPE == 0 ? 4 : SCALED ? 1 : 2;
static constexpr u32 WARPS = 4;
static constexpr u32 THREADS = WARPS * 32;

// Elements a lane holds of a vector, and lanes of a stream.
static constexpr u32 PART = SCALED ? 16 : 8;
static constexpr u32 PARTS = DIM / PART;
static constexpr u32 STREAM_LANES = PARTS <= 4 ? 4 : PARTS <= 8 ? 8 : PARTS <= 16 ? 16 : 32;
static constexpr u32 STREAMS_A_WARP = 32 / STREAM_LANES;
static constexpr u32 STREAMS = WARPS * STREAMS_A_WARP;
static constexpr u32 AHEAD = 4;
static_assert(DIM % 16 == 0 && PARTS <= 32, "head widths are multiples of 16, at most 256");

struct StoreArgs {
    KvPages kv;
    float* q;        // [n][heads][DIM], normed and turned in place
    const float* k;  // [n][kv_heads][DIM]
    const float* v;
    const float* q_norm;  // [DIM], or null
    const float* k_norm;
    const float* cos;  // [position][DIM / 2]
    const float* sin;
    const u32* positions;  // [n]
    const u32* tables;     // [n]: where the page table of the token's row starts in `pages`
    const u32* pages;
    u32 n;
    u32 heads;
    u32 kv_heads;
    u32 halves;  // rotary pairs are halves of a head, not neighbors
    float eps;
};

#if KV_TYPE == 0
DEVICE void store_element(u8* slot, u32 d, float x, float) { ((float*)slot)[d] = x; }
#elif KV_TYPE == 1
DEVICE void store_element(u8* slot, u32 d, float x, float) { ((u16*)slot)[d] = f32_to_f16(x); }
#elif KV_TYPE == 2
DEVICE void store_element(u8* slot, u32 d, float x, float) { ((u16*)slot)[d] = f32_to_bf16(x); }
#elif KV_TYPE == 3
DEVICE void store_element(u8* slot, u32 d, float x, float inverse) {
    slot[d] = f32_to_e4m3(x * inverse);
}
#else
DEVICE void store_element(u8* slot, u32 d, float x, float inverse) {
    slot[d] = (u8)(i8)rintf(x * inverse);
}
#endif
static constexpr float LARGEST = KV_TYPE == 3 ? 448.0f : 127.0f;

// A warp takes one head of one token: norm, rotation, and for keys and values the store.
KERNEL(store_kv, StoreArgs, 128) {
    __shared__ float rows[WARPS][DIM];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* row = rows[warp];
    const u32 slots = a.heads + 2 * a.kv_heads;
    const u64 item = (u64)blockIdx.x * WARPS + warp;
    if (item >= (u64)a.n * slots) return;
    const u32 token = (u32)(item / slots);
    u32 head = (u32)(item % slots);
    const u32 kind = head < a.heads ? 0 : head < a.heads + a.kv_heads ? 1 : 2;
    head -= kind == 0 ? 0 : kind == 1 ? a.heads : a.heads + a.kv_heads;
    const u32 position = a.positions[token];
    const float* source = kind == 0 ? a.q : kind == 1 ? a.k : a.v;
    const u64 at = ((u64)token * (kind == 0 ? a.heads : a.kv_heads) + head) * DIM;
    for (u32 d = lane; d < DIM; d += 32) row[d] = source[at + d];
    __syncwarp();
    const float* norm = kind == 0 ? a.q_norm : kind == 1 ? a.k_norm : nullptr;
    if (norm) {
        float squares = 0.0f;
        for (u32 d = lane; d < DIM; d += 32) squares += row[d] * row[d];
        const float scale = 1.0f / sqrtf(warp_sum(squares) / DIM + a.eps);
        for (u32 d = lane; d < DIM; d += 32) row[d] = row[d] * scale * norm[d];
        __syncwarp();
    }
    if (kind < 2) {
        for (u32 pair = lane; pair < DIM / 2; pair += 32) {
            const u64 angle = (u64)position * (DIM / 2) + pair;
            const float cos = a.cos[angle], sin = a.sin[angle];
            const u32 first = a.halves ? pair : 2 * pair;
            const u32 second = a.halves ? pair + DIM / 2 : 2 * pair + 1;
            const float x = row[first], y = row[second];
            row[first] = x * cos - y * sin;
            row[second] = x * sin + y * cos;
        }
        __syncwarp();
    }
    if (kind == 0) {
        for (u32 d = lane; d < DIM; d += 32) a.q[at + d] = row[d];
        return;
    }
    const u32 page = a.pages[a.tables[token] + (position >> a.kv.page_shift)];
    u8* base = kv_head_at(a.kv, page, kind - 1, head);
    const u32 slot = position & ((1u << a.kv.page_shift) - 1);
    float inverse = 0.0f;
    if (SCALED) {
        float most = 0.0f;
        for (u32 d = lane; d < DIM; d += 32) most = fmaxf(most, fabsf(row[d]));
        most = warp_max(most);
        inverse = most > 0.0f ? LARGEST / most : 0.0f;
        float* scales = (float*)(base + ((i64)DIM << a.kv.page_shift));
        if (lane == 0) scales[slot] = most / LARGEST;
    }
    u8* out = base + (i64)slot * (DIM * ELEMENT_BYTES);
    for (u32 d = lane; d < DIM; d += 32) store_element(out, d, row[d], inverse);
}

// 16 bytes of a vector (32 of an f32 one) as they come from memory.
struct Part {
    uint4 low;
#if KV_TYPE == 0
    uint4 high;
#endif
};
DEVICE Part part_at(const u8* vector, u32 part) {
    const uint4* from = (const uint4*)(vector + part * (PART * ELEMENT_BYTES));
    Part out;
    out.low = from[0];
#if KV_TYPE == 0
    out.high = from[1];
#endif
    return out;
}
DEVICE void widen(const Part& part, float out[PART]) {
#if KV_TYPE == 0
    const u32 words[8] = {part.low.x,  part.low.y,  part.low.z,  part.low.w,
                          part.high.x, part.high.y, part.high.z, part.high.w};
    for (u32 i = 0; i < 8; i++) out[i] = bits_f32(words[i]);
#else
    const u32 words[4] = {part.low.x, part.low.y, part.low.z, part.low.w};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
#if KV_TYPE == 1
        out[2 * i] = f16_to_f32((u16)words[i]);
        out[2 * i + 1] = f16_to_f32((u16)(words[i] >> 16));
#elif KV_TYPE == 2
        out[2 * i] = bits_f32(words[i] << 16);
        out[2 * i + 1] = bits_f32(words[i] & 0xffff0000u);
#else
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            const u8 byte = (u8)(words[i] >> 8 * j);
#if KV_TYPE == 3
            out[4 * i + j] = e4m3_to_f32(byte);
#else
            out[4 * i + j] = (float)(i8)byte;
#endif
        }
#endif
    }
#endif
}

struct DecodeArgs {
    KvPages kv;
    const float* q;  // [n][heads][DIM]
    float* out;      // [n][heads][DIM]
    float* partial;  // [n][heads][splits][DIM], then [n][heads][splits][2]: largest score, sum
    const u32* chosen;  // [n]: which tokens of the step
    const u32* positions;
    const u32* tables;
    const u32* pages;
    u32 n;
    u32 heads;
    u32 kv_heads;
    u32 splits;        // of the longest context
    u32 split_tokens;  // positions of one split; splits start at its multiples
    float scale;
};
DEVICE float* partial_sums(const DecodeArgs& a, u64 index) {
    return a.partial + (u64)a.n * a.heads * a.splits * DIM + index * 2;
}

// Grid: chosen token, kv head x group of GROUP query heads, split.
template <u32 GROUP> DEVICE void decode(const DecodeArgs& a) {
    const u32 token = a.chosen[blockIdx.x], split = blockIdx.z;
    const u32 queries = a.heads / a.kv_heads, groups = (queries + GROUP - 1) / GROUP;
    const u32 kv_head = blockIdx.y / groups, first = blockIdx.y % groups * GROUP;
    const u32 length = a.positions[token] + 1;
    const u32 splits = (length + a.split_tokens - 1) / a.split_tokens;
    if (split >= splits) return;
    const u32 begin = split * a.split_tokens, end = min(begin + a.split_tokens, length);
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 stream = warp * STREAMS_A_WARP + lane / STREAM_LANES, part = lane % STREAM_LANES;
    const bool holds = part < PARTS;
    const u32 mask = (1u << a.kv.page_shift) - 1;
    const u32* table = a.pages + a.tables[token];
    const u64 q_head = (u64)token * a.heads + kv_head * queries + first;

    float q[GROUP][PART], acc[GROUP][PART], most[GROUP], sum[GROUP];
#pragma unroll
    for (u32 g = 0; g < GROUP; g++) {
        most[g] = -INFINITE;
        sum[g] = 0.0f;
        const bool there = holds && first + g < queries;
        const float* from = a.q + (q_head + (there ? g : 0)) * DIM + (holds ? part : 0) * PART;
#pragma unroll
        for (u32 i = 0; i < PART; i++) {
            q[g][i] = there ? from[i] * a.scale : 0.0f;
            acc[g][i] = 0.0f;
        }
    }
    for (u32 base = begin; base < end; base += STREAMS * AHEAD) {
        Part keys[AHEAD], values[AHEAD];
        float key_scales[AHEAD], value_scales[AHEAD];
#pragma unroll
        for (u32 u = 0; u < AHEAD; u++) {
            const u32 position = base + u * STREAMS + stream;
            keys[u] = Part{};
            values[u] = Part{};
            key_scales[u] = value_scales[u] = 1.0f;
            if (position >= end || !holds) continue;
            const u32 slot = position & mask;
            const u8* k = kv_head_at(a.kv, table[position >> a.kv.page_shift], 0, kv_head);
            const u8* v = k + a.kv.side_bytes;
            keys[u] = part_at(k + (i64)slot * (DIM * ELEMENT_BYTES), part);
            values[u] = part_at(v + (i64)slot * (DIM * ELEMENT_BYTES), part);
            if (SCALED) {
                const i64 scales = (i64)DIM << a.kv.page_shift;
                key_scales[u] = ((const float*)(k + scales))[slot];
                value_scales[u] = ((const float*)(v + scales))[slot];
            }
        }
        float scores[AHEAD][GROUP];
#pragma unroll
        for (u32 u = 0; u < AHEAD; u++) {
            float key[PART];
            widen(keys[u], key);
#pragma unroll
            for (u32 g = 0; g < GROUP; g++) {
                float score = 0.0f;
#pragma unroll
                for (u32 i = 0; i < PART; i++) score += q[g][i] * key[i];
                if (SCALED) score *= key_scales[u];
#pragma unroll
                for (u32 step = STREAM_LANES / 2; step > 0; step >>= 1)
                    score += __shfl_xor_sync(~0u, score, step);
                const bool there = base + u * STREAMS + stream < end;
                scores[u][g] = there ? score : -INFINITE;
            }
        }
#pragma unroll
        for (u32 g = 0; g < GROUP; g++) {
            float top = most[g];
#pragma unroll
            for (u32 u = 0; u < AHEAD; u++) top = fmaxf(top, scores[u][g]);
            // A stream without any token so far keeps weights of zero.
            const float safe = top == -INFINITE ? 0.0f : top;
            const float keep = __expf(most[g] - safe);
            most[g] = top;
            sum[g] *= keep;
#pragma unroll
            for (u32 i = 0; i < PART; i++) acc[g][i] *= keep;
#pragma unroll
            for (u32 u = 0; u < AHEAD; u++) {
                scores[u][g] = __expf(scores[u][g] - safe);
                sum[g] += scores[u][g];
            }
        }
#pragma unroll
        for (u32 u = 0; u < AHEAD; u++) {
            float value[PART];
            widen(values[u], value);
#pragma unroll
            for (u32 g = 0; g < GROUP; g++) {
                const float weight = SCALED ? scores[u][g] * value_scales[u] : scores[u][g];
#pragma unroll
                for (u32 i = 0; i < PART; i++) acc[g][i] += weight * value[i];
            }
        }
    }

    // [stream][GROUP][DIM], then [stream][GROUP][2].
    float* shared = (float*)DYNAMIC_SHARED;
    float* ends = shared + STREAMS * GROUP * DIM;
#pragma unroll
    for (u32 g = 0; g < GROUP; g++) {
        float* mine = shared + (stream * GROUP + g) * DIM + part * PART;
        if (holds) {
#pragma unroll
            for (u32 i = 0; i < PART; i++) mine[i] = acc[g][i];
        }
        if (part == 0) {
            ends[(stream * GROUP + g) * 2] = most[g];
            ends[(stream * GROUP + g) * 2 + 1] = sum[g];
        }
    }
    __syncthreads();
    for (u32 item = threadIdx.x; item < GROUP * DIM; item += THREADS) {
        const u32 g = item / DIM, d = item % DIM;
        if (first + g >= queries) continue;
        float top = -INFINITE, total = 0.0f, value = 0.0f;
        for (u32 s = 0; s < STREAMS; s++) top = fmaxf(top, ends[(s * GROUP + g) * 2]);
        for (u32 s = 0; s < STREAMS; s++) {
            const float weight = __expf(ends[(s * GROUP + g) * 2] - top);
            total += ends[(s * GROUP + g) * 2 + 1] * weight;
            value += shared[(s * GROUP + g) * DIM + d] * weight;
        }
        if (splits == 1) {
            a.out[(q_head + g) * DIM + d] = value / total;
            continue;
        }
        const u64 head = (u64)blockIdx.x * a.heads + kv_head * queries + first + g;
        const u64 index = head * a.splits + split;
        a.partial[index * DIM + d] = value;
        if (d == 0) {
            partial_sums(a, index)[0] = top;
            partial_sums(a, index)[1] = total;
        }
    }
}
KERNEL(attention_decode_1, DecodeArgs, 128) { decode<1>(a); }
KERNEL(attention_decode_4, DecodeArgs, 128) { decode<4>(a); }
#if KV_TYPE < 3
KERNEL(attention_decode_8, DecodeArgs, 128) { decode<8>(a); }
#endif

// Grid: chosen token, query head. Splits are summed in ascending order.
KERNEL(attention_merge, DecodeArgs, 128) {
    const u64 head = (u64)blockIdx.x * a.heads + blockIdx.y;
    const u32 token = a.chosen[blockIdx.x], splits = a.positions[token] / a.split_tokens + 1;
    if (splits == 1) return;
    float top = -INFINITE;
    for (u32 s = 0; s < splits; s++) top = fmaxf(top, partial_sums(a, head * a.splits + s)[0]);
    for (u32 d = threadIdx.x; d < DIM; d += THREADS) {
        float total = 0.0f, value = 0.0f;
        for (u32 s = 0; s < splits; s++) {
            const u64 index = head * a.splits + s;
            const float weight = __expf(partial_sums(a, index)[0] - top);
            total += partial_sums(a, index)[1] * weight;
            value += a.partial[index * DIM + d] * weight;
        }
        a.out[((u64)token * a.heads + blockIdx.y) * DIM + d] = value / total;
    }
}

#if KV_TYPE != 0
struct PrefillArgs {
    KvPages kv;
    const float* q;  // [n][heads][DIM]
    float* out;
    const u32* positions;
    const u32* tables;
    const u32* pages;
    const uint2* tiles;  // first token in the step and number of tokens, at most 64, of one row
    u32 heads;
    u32 kv_heads;
    float scale;
};

static constexpr u32 TILE_QUERIES = 64;
static constexpr u32 TILE_KEYS = DIM <= 128 ? 64 : 32;
// Eight elements of padding put the rows of a fragment into different banks.
static constexpr u32 PITCH = DIM + 8;
static constexpr u32 STEPS = DIM / 16;
// Blocks an SM runs at once; without the number ptxas spills for some widths.
static constexpr u32 PREFILL_BLOCKS = DIM <= 128 ? 3 : 2;

#if KV_TYPE == 2
DEVICE u16 to_16(float x) { return f32_to_bf16(x); }
DEVICE void mma(float c[4], const u32 x[4], u32 b0, u32 b1) { mma_bf16(c, x, b0, b1); }
#else
DEVICE u16 to_16(float x) { return f32_to_f16(x); }
DEVICE void mma(float c[4], const u32 x[4], u32 b0, u32 b1) { mma_f16(c, x, b0, b1); }
#endif
DEVICE u32 pack_floats(float low, float high) { return pack(to_16(low), to_16(high)); }

// Keys or values of TILE_KEYS positions from `begin` on; zeros from `end` on.
DEVICE void load_tile(const PrefillArgs& a, u16* tile, const u32* table, u32 side, u32 head,
                      u32 begin, u32 end) {
    for (u32 item = threadIdx.x; item < TILE_KEYS * PARTS; item += THREADS) {
        const u32 row = item / PARTS, part = item % PARTS, position = begin + row;
        uint4* out = (uint4*)(tile + row * PITCH + part * PART);
        Part raw = Part{};
        [[maybe_unused]] float scale = 0.0f;
        if (position < end) {
            const u32 slot = position & ((1u << a.kv.page_shift) - 1);
            const u8* base = kv_head_at(a.kv, table[position >> a.kv.page_shift], side, head);
            raw = part_at(base + (i64)slot * (DIM * ELEMENT_BYTES), part);
            if (SCALED) scale = ((const float*)(base + ((i64)DIM << a.kv.page_shift)))[slot];
        }
#if KV_TYPE < 3
        out[0] = raw.low;
#else
        float wide[PART];
        widen(raw, wide);
        u32 words[8];
#pragma unroll
        for (u32 i = 0; i < 8; i++)
            words[i] = pack_floats(wide[2 * i] * scale, wide[2 * i + 1] * scale);
        out[0] = uint4{words[0], words[1], words[2], words[3]};
        out[1] = uint4{words[4], words[5], words[6], words[7]};
#endif
    }
}

// Grid: tile of queries, query head. A warp has 16 queries; a lane has parts of rows g and g + 8.
KERNEL(attention_prefill, PrefillArgs, 128, PREFILL_BLOCKS) {
    u16* keys = (u16*)DYNAMIC_SHARED;
    u16* values = keys + TILE_KEYS * PITCH;
    u16* queries = values + TILE_KEYS * PITCH;
    const uint2 tile = a.tiles[blockIdx.x];
    const u32 head = blockIdx.y, kv_head = head / (a.heads / a.kv_heads);
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const u32* table = a.pages + a.tables[tile.x];
    const u32 first_position = a.positions[tile.x];
    const u32 end = first_position + tile.y;

    for (u32 item = threadIdx.x; item < TILE_QUERIES * (DIM / 2); item += THREADS) {
        const u32 row = item / (DIM / 2), d = item % (DIM / 2) * 2;
        const float* from = a.q + ((u64)(tile.x + row) * a.heads + head) * DIM + d;
        u32 both = 0;
        if (row < tile.y) both = pack_floats(from[0], from[1]);
        *(u32*)(queries + row * PITCH + d) = both;
    }
    // Rows past the end compute what the last one does, and are not written.
    const u32 row[2] = {warp * 16 + g, warp * 16 + g + 8};
    const u32 last[2] = {first_position + min(row[0], tile.y - 1),
                         first_position + min(row[1], tile.y - 1)};
    float acc[DIM / 8][4], most[2] = {-INFINITE, -INFINITE}, sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (u32 i = 0; i < DIM / 8; i++)
        for (u32 j = 0; j < 4; j++) acc[i][j] = 0.0f;

    for (u32 begin = 0; begin < end; begin += TILE_KEYS) {
        __syncthreads();
        load_tile(a, keys, table, 0, kv_head, begin, end);
        load_tile(a, values, table, 1, kv_head, begin, end);
        __syncthreads();
        float scores[TILE_KEYS / 8][4];
#pragma unroll
        for (u32 i = 0; i < TILE_KEYS / 8; i++)
            for (u32 j = 0; j < 4; j++) scores[i][j] = 0.0f;
#pragma unroll
        for (u32 step = 0; step < STEPS; step++) {
            const u16* from = queries + (warp * 16 + g) * PITCH + step * 16 + 2 * t;
            const u32 q[4] = {*(const u32*)from, *(const u32*)(from + 8 * PITCH),
                              *(const u32*)(from + 8), *(const u32*)(from + 8 * PITCH + 8)};
#pragma unroll
            for (u32 i = 0; i < TILE_KEYS / 8; i++) {
                const u16* key = keys + (i * 8 + g) * PITCH + step * 16 + 2 * t;
                mma(scores[i], q, *(const u32*)key, *(const u32*)(key + 8));
            }
        }
#pragma unroll
        for (u32 i = 0; i < TILE_KEYS / 8; i++)
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                const u32 position = begin + i * 8 + 2 * t + j % 2;
                scores[i][j] = position <= last[j / 2] ? scores[i][j] * a.scale : -INFINITE;
            }
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float top = most[half];
#pragma unroll
            for (u32 i = 0; i < TILE_KEYS / 8; i++)
                top = fmaxf(top, fmaxf(scores[i][2 * half], scores[i][2 * half + 1]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            // Position 0 is in the first tile and every row sees it, so `top` is a number.
            const float keep = __expf(most[half] - top);
            most[half] = top;
            float here = 0.0f;
#pragma unroll
            for (u32 i = 0; i < TILE_KEYS / 8; i++)
#pragma unroll
                for (u32 j = 2 * half; j < 2 * half + 2; j++) {
                    scores[i][j] = __expf(scores[i][j] - top);
                    here += scores[i][j];
                }
            here += __shfl_xor_sync(~0u, here, 1);
            here += __shfl_xor_sync(~0u, here, 2);
            sum[half] = sum[half] * keep + here;
#pragma unroll
            for (u32 i = 0; i < DIM / 8; i++) {
                acc[i][2 * half] *= keep;
                acc[i][2 * half + 1] *= keep;
            }
        }
        // The scores of a lane are in place as the left side of the second product.
#pragma unroll
        for (u32 step = 0; step < TILE_KEYS / 16; step++) {
            const float* low = scores[2 * step];
            const float* high = scores[2 * step + 1];
            const u32 weights[4] = {pack_floats(low[0], low[1]), pack_floats(low[2], low[3]),
                                    pack_floats(high[0], high[1]), pack_floats(high[2], high[3])};
#pragma unroll
            for (u32 i = 0; i < DIM / 8; i++) {
                u32 b0, b1;
                load_transposed(b0, b1, values + (step * 16 + lane % 16) * PITCH + i * 8);
                mma(acc[i], weights, b0, b1);
            }
        }
    }
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        if (row[half] >= tile.y) continue;
        float* out = a.out + ((u64)(tile.x + row[half]) * a.heads + head) * DIM + 2 * t;
#pragma unroll
        for (u32 i = 0; i < DIM / 8; i++) {
            out[i * 8] = acc[i][2 * half] / sum[half];
            out[i * 8 + 1] = acc[i][2 * half + 1] / sum[half];
        }
    }
}
#endif
