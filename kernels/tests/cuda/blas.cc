
// cuBLASLt as plain loops, behind the driver's text in one unit. Strict about what a caller can get
// wrong: descriptions and sizes must match, columns must not overlap, operands must be inside
// memory and aligned, an algorithm belongs to the shape it was chosen for, and a result that is not
// to be added to is not read.
namespace {
struct Layout { int type; u64 rows, cols; long long ld; };
struct Matmul { int transposed[2] = {0, 0}; int epilogue = 1; u64 bias = 0; };
struct Preference { u64 workspace = 0; };
struct Algorithm { u64 words[8]; };
struct Heuristic { Algorithm algorithm; size_t workspace; int state; float waves; int reserved[4]; };
constexpr u64 BLAS_WORKSPACE = 1 << 20;

template <class T> int describe(void** out, T* value) {
    descriptions.insert(value);
    *out = value;
    return 0;
}
template <class T> int destroy(void* value) {
    if (!descriptions.erase(value)) return 7;
    delete (T*)value;
    return 0;
}
size_t element_bytes(int type) { return type == 0 ? 4 : 2; }
bool columns_apart(const Layout& it) { return it.ld >= (long long)it.rows && it.rows && it.cols; }
// Rows and columns of op(it).
u64 op_rows(const Layout& it, int transposed) { return transposed ? it.cols : it.rows; }
u64 op_cols(const Layout& it, int transposed) { return transposed ? it.rows : it.cols; }
bool multiplies(const Matmul& mul, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
    const u64 m = op_rows(a, mul.transposed[0]), k = op_cols(a, mul.transposed[0]);
    return columns_apart(a) && columns_apart(b) && columns_apart(c) && columns_apart(d) &&
           op_rows(b, mul.transposed[1]) == k && d.rows == m &&
           d.cols == op_cols(b, mul.transposed[1]) && c.rows == m && c.cols == d.cols &&
           a.type == b.type && (a.type == 2 || a.type == 14) && c.type == 0 && d.type == 0 &&
           (mul.epilogue == 1 || (mul.epilogue == 4 && mul.bias));
}
Algorithm algorithm_for(const Matmul& mul, const Layout& a, const Layout& b, const Layout& d) {
    return {{d.rows, d.cols, op_cols(a, mul.transposed[0]), (u64)a.type, (u64)a.ld, (u64)b.ld,
             (u64)d.ld, (u64)mul.epilogue}};
}
bool placed(u64 at, const Layout& it) {
    const size_t elements = (it.cols - 1) * it.ld + it.rows;
    return at % 16 == 0 && inside(device_memory, at, elements * element_bytes(it.type));
}
float element(u64 at, const Layout& it, int transposed, u64 row, u64 col) {
    const u64 index = transposed ? row * it.ld + col : col * it.ld + row;
    const uint16_t bits = ((const uint16_t*)at)[index];
    return it.type == 2 ? f16_to_f32(bits) : __uint_as_float(uint32_t(bits) << 16);
}
}  // namespace
#define BLAS_BEGIN                                         \
    std::lock_guard<std::recursive_mutex> guard(lock);     \
    if (begin(__func__)) return 14;

extern "C" __attribute__((visibility("default"))) size_t cublasLtGetVersion() { return 120900; }
CALL(cublasLtCreate, void** out) {
    BLAS_BEGIN
    *out = new char;
    blas_handles.insert(*out);
    return 0;
}
CALL(cublasLtDestroy, void* handle) {
    BLAS_BEGIN
    if (!blas_handles.erase(handle)) return 7;
    delete (char*)handle;
    return 0;
}
CALL(cublasLtMatmulDescCreate, void** out, int compute, int scale) {
    BLAS_BEGIN
    if (compute != 68 || scale != 0) return 15;
    return describe(out, new Matmul);
}
CALL(cublasLtMatmulDescDestroy, void* value) { BLAS_BEGIN return destroy<Matmul>(value); }
CALL(cublasLtMatmulDescSetAttribute, void* value, int which, const void* from, size_t bytes) {
    BLAS_BEGIN
    if (!descriptions.count(value)) return 7;
    Matmul* mul = (Matmul*)value;
    if ((which == 3 || which == 4) && bytes == 4) memcpy(&mul->transposed[which - 3], from, 4);
    else if (which == 7 && bytes == 4) memcpy(&mul->epilogue, from, 4);
    else if (which == 8 && bytes == 8) memcpy(&mul->bias, from, 8);
    else return 7;
    return 0;
}
CALL(cublasLtMatrixLayoutCreate, void** out, int type, u64 rows, u64 cols, long long ld) {
    BLAS_BEGIN
    return describe(out, new Layout{type, rows, cols, ld});
}
CALL(cublasLtMatrixLayoutDestroy, void* value) { BLAS_BEGIN return destroy<Layout>(value); }
CALL(cublasLtMatmulPreferenceCreate, void** out) { BLAS_BEGIN return describe(out, new Preference); }
CALL(cublasLtMatmulPreferenceDestroy, void* value) { BLAS_BEGIN return destroy<Preference>(value); }
CALL(cublasLtMatmulPreferenceSetAttribute, void* value, int which, const void* from, size_t bytes) {
    BLAS_BEGIN
    if (!descriptions.count(value) || which != 1 || bytes != 8) return 7;
    memcpy(&((Preference*)value)->workspace, from, 8);
    return 0;
}
CALL(cublasLtMatmulAlgoGetHeuristic, void* handle, void* mul, void* a, void* b, void* c, void* d,
     void* preference, int wanted, Heuristic* out, int* count) {
    BLAS_BEGIN
    for (void* it : {mul, a, b, c, d, preference}) if (!descriptions.count(it)) return 7;
    if (!blas_handles.count(handle) || wanted != 1) return 7;
    *count = 0;
    const Matmul& product = *(Matmul*)mul;
    if (!multiplies(product, *(Layout*)a, *(Layout*)b, *(Layout*)c, *(Layout*)d)) return 7;
    if (((Preference*)preference)->workspace < BLAS_WORKSPACE) return 15;
    *out = {algorithm_for(product, *(Layout*)a, *(Layout*)b, *(Layout*)d), BLAS_WORKSPACE, 0, 1.0f, {}};
    *count = 1;
    return 0;
}
CALL(cublasLtMatmul, void* handle, void* mul, const float* alpha, u64 a, void* a_is, u64 b, void* b_is,
     const float* beta, u64 c, void* c_is, u64 d, void* d_is, const Algorithm* algorithm,
     u64 workspace, size_t workspace_bytes, void* stream) {
    BLAS_BEGIN
    for (void* it : {mul, a_is, b_is, c_is, d_is}) if (!descriptions.count(it)) return 7;
    const Matmul product = *(Matmul*)mul;
    const Layout la = *(Layout*)a_is, lb = *(Layout*)b_is, lc = *(Layout*)c_is, ld = *(Layout*)d_is;
    if (!blas_handles.count(handle) || !multiplies(product, la, lb, lc, ld)) return 7;
    const Algorithm chosen = algorithm_for(product, la, lb, ld);
    if (memcmp(&chosen, algorithm, sizeof chosen)) return 7;
    if (workspace_bytes < BLAS_WORKSPACE || !inside(device_memory, workspace, workspace_bytes)) return 7;
    if (!placed(a, la) || !placed(b, lb) || !placed(c, lc) || !placed(d, ld)) return 7;
    if (product.epilogue == 4 && !inside(device_memory, product.bias, 4 * ld.rows)) return 7;
    const float by = *alpha, keep = *beta;
    blas_products++;
    return enqueue(stream, [=] {
        const u64 depth = op_cols(la, product.transposed[0]);
        // What an algorithm keeps there is garbage for the next one.
        memset((void*)workspace, 0xff, BLAS_WORKSPACE);
        for (u64 col = 0; col < ld.cols; col++)
            for (u64 row = 0; row < ld.rows; row++) {
                float sum = 0.0f;
                for (u64 k = 0; k < depth; k++)
                    sum += element(a, la, product.transposed[0], row, k) *
                           element(b, lb, product.transposed[1], k, col);
                float value = by * sum;
                if (keep != 0.0f) value += keep * ((const float*)c)[col * lc.ld + row];
                if (product.epilogue == 4) value += ((const float*)product.bias)[row];
                ((float*)d)[col * ld.ld + row] = value;
            }
    }) ? 13 : 0;
}
