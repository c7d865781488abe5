// Drawing tokens on the device: the largest logit, or temperature, min-p, top-k and top-p, in this
// order, with the CPU's draw from (seed, output index). One block a row, sums in 64 bits.
//
// Candidates are ordered by larger logit, then lower token. Instead of sorting, the keys' order is
// searched by halves: how much weight, or how many tokens, lie at or above a key. Bias, penalties,
// masks and log probabilities are the CPU's part; rows that need them are copied there.

struct SampleRow {
    float temperature;  // 0: the largest logit
    float top_p;
    float min_p;
    u32 top_k;  // 0: all
    u32 output_index;
    u32 unused;
    u64 seed;
};
struct SampleArgs {
    const float* logits;  // [n][vocab]
    const SampleRow* rows;
    u32* tokens;  // [n]; all ones: nothing can be drawn
    u32 vocab;
};

static constexpr u32 SAMPLE_THREADS = 512;
static constexpr u32 NOTHING = ~0u;

// Of the order of the floats; NaN is given no key by the callers.
DEVICE u32 key_of(float x) {
    const u32 bits = f32_bits(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
DEVICE double sum_of_block(double x, double* shared) {
    __syncthreads();
    shared[threadIdx.x] = x;
    __syncthreads();
    for (u32 step = SAMPLE_THREADS / 2; step > 0; step >>= 1) {
        if (threadIdx.x < step) shared[threadIdx.x] += shared[threadIdx.x + step];
        __syncthreads();
    }
    return shared[0];
}
DEVICE u64 mixed(u64 state) {
    u64 z = state + 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
DEVICE double unit_draw(u64 seed, u32 output_index) {
    const u64 word = mixed(mixed(seed ^ 0x52434b4452415753ull) + output_index + 1);
    return (double)(word >> 11) / 9007199254740992.0;
}

// A row as its threads see it: which tokens are left, and what each weighs.
struct Candidates {
    const float* logits;
    u32 vocab;
    double most;
    double temperature;
    double floor;
    u32 low_key;     // left: keys above this one,
    u32 last_token;  // and at it, tokens up to this one
};
DEVICE double weight_of(const Candidates& c, u32 token) {
    const float logit = c.logits[token];
    const u32 key = key_of(logit);
    if (key < c.low_key || (key == c.low_key && token > c.last_token)) return 0.0;
    const double weight = exp(((double)logit - c.most) / c.temperature);
    return weight > 0.0 && weight >= c.floor ? weight : 0.0;
}
// Weight (or with `counts` the number) of the candidates with a key of at least `key`.
DEVICE double mass_from(const Candidates& c, u32 key, bool counts, double* shared) {
    double sum = 0.0;
    for (u32 i = threadIdx.x; i < c.vocab; i += SAMPLE_THREADS) {
        if (key_of(c.logits[i]) < key) continue;
        const double weight = weight_of(c, i);
        sum += counts ? (double)(weight > 0.0) : weight;
    }
    return sum_of_block(sum, shared);
}
// The first candidate in order at which the sum reaches `wanted` (`past`: exceeds it): its key
// into `key`, the token is returned. Threads agree.
DEVICE u32 candidate_at(const Candidates& c, double wanted, bool counts, bool past, u32& key,
                        double* shared) {
    u32 low = 0, high = ~0u;  // the largest key from which the mass reaches it
    while (low < high) {
        const u32 middle = low + (high - low) / 2 + 1;
        const double mass = mass_from(c, middle, counts, shared);
        if (past ? mass > wanted : mass >= wanted) low = middle;
        else high = middle - 1;
    }
    key = low;
    double before = low == ~0u ? 0.0 : mass_from(c, low + 1, counts, shared);
    // Equal keys have equal weights; the ascending token decides.
    __shared__ u32 found;
    if (threadIdx.x == 0) {
        found = NOTHING;
        for (u32 i = 0; i < c.vocab; i++) {
            if (key_of(c.logits[i]) != low) continue;
            const double weight = weight_of(c, i);
            if (weight == 0.0) continue;
            before += counts ? 1.0 : weight;
            found = i;
            if (past ? before > wanted : before >= wanted) break;
        }
    }
    __syncthreads();
    const u32 token = found;
    __syncthreads();
    return token;
}

// The largest logit, the first on a tie; NaN never wins.
DEVICE u32 largest(const float* logits, u32 vocab) {
    __shared__ float values[SAMPLE_THREADS];
    __shared__ u32 tokens[SAMPLE_THREADS];
    float best = -INFINITE;
    u32 token = NOTHING;
    for (u32 i = threadIdx.x; i < vocab; i += SAMPLE_THREADS)
        if (logits[i] > best) {
            best = logits[i];
            token = i;
        }
    values[threadIdx.x] = best;
    tokens[threadIdx.x] = token;
    __syncthreads();
    for (u32 step = SAMPLE_THREADS / 2; step > 0; step >>= 1) {
        if (threadIdx.x < step) {
            const float other = values[threadIdx.x + step];
            const u32 its = tokens[threadIdx.x + step];
            const bool wins = other > values[threadIdx.x] ||
                              (other == values[threadIdx.x] && its < tokens[threadIdx.x]);
            if (wins) {
                values[threadIdx.x] = other;
                tokens[threadIdx.x] = its;
            }
        }
        __syncthreads();
    }
    return tokens[0];
}

KERNEL(sample, SampleArgs, 512) {
    __shared__ double sums[SAMPLE_THREADS];
    const SampleRow row = a.rows[blockIdx.x];
    const float* logits = a.logits + (u64)blockIdx.x * a.vocab;
    const u32 best = largest(logits, a.vocab);
    if (row.temperature == 0.0f || best == NOTHING || logits[best] == INFINITE) {
        if (threadIdx.x == 0) a.tokens[blockIdx.x] = best;
        return;
    }
    Candidates c = {logits, a.vocab, logits[best], row.temperature, row.min_p, 0, ~0u};
    bool ordered = false;
    u32 key;
    const double left = mass_from(c, 0, true, sums);
    if (row.top_k > 0 && row.top_k < left) {
        c.last_token = candidate_at(c, row.top_k, true, false, key, sums);
        c.low_key = key;
        ordered = true;
    }
    if (row.top_p < 1.0f) {
        const double total = mass_from(c, 0, false, sums);
        const u32 last = candidate_at(c, row.top_p * total, false, false, key, sums);
        c.last_token = last;
        c.low_key = key;
        ordered = true;
    }
    const double total = mass_from(c, 0, false, sums);
    const double wanted = unit_draw(row.seed, row.output_index) * total;
    if (ordered) {
        const u32 token = candidate_at(c, wanted, false, true, key, sums);
        if (threadIdx.x == 0) a.tokens[blockIdx.x] = token;
        return;
    }
    // In the order of the tokens: each thread has a run of them.
    const u32 run = (a.vocab + SAMPLE_THREADS - 1) / SAMPLE_THREADS;
    const u32 begin = min(threadIdx.x * run, a.vocab), end = min(begin + run, a.vocab);
    double mine = 0.0;
    for (u32 i = begin; i < end; i++) mine += weight_of(c, i);
    __syncthreads();
    sums[threadIdx.x] = mine;
    __syncthreads();
    if (threadIdx.x != 0) return;
    double before = 0.0;
    u32 token = best, thread = 0;
    while (thread + 1 < SAMPLE_THREADS && before + sums[thread] <= wanted) before += sums[thread++];
    for (u32 i = thread * run; i < a.vocab; i++) {
        const double weight = weight_of(c, i);
        if (weight == 0.0) continue;
        token = i;
        before += weight;
        if (before > wanted) break;
    }
    a.tokens[blockIdx.x] = token;
}
