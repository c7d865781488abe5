// A CUDA driver without a GPU: every call of the driver and of NVRTC that the Rust side makes, over
// the emulated kernels. Work is queued on its stream and runs when somebody waits for it, so that a
// missing wait or event shows: what was not waited for is not there. A stream that captures keeps
// its work for a graph instead; calls that a capture forbids end it. Device memory is filled with
// NaN. `mock_fail_at(n, code)` makes the n-th call from now fail, `mock_report` counts what is left.
// Built as libcuda.so.1 and, by its alias, as libnvrtc.so.12.
#define EMULATION_MAIN
#include "emulation.h"
#include <chrono>
#include <deque>
#include <mutex>
#include <set>
#include <thread>

#define CALL(name, ...) extern "C" __attribute__((visibility("default"))) int name(__VA_ARGS__)
using u64 = unsigned long long;

namespace {
std::recursive_mutex lock;
struct Event;
struct Op {
    std::function<void()> run;
    std::shared_ptr<Event> waits_for;
    std::shared_ptr<Event> records;
};
// What a graph keeps: functions that read their own copy of the arguments, so they run any number
// of times.
using Work = std::vector<std::function<void()>>;
struct Capture { Work work; std::thread::id thread; bool broken = false; };
struct Stream { std::deque<Op> queue; std::unique_ptr<Capture> capture; };
struct Graph { Work work; };
struct GraphExec { Work work; size_t bytes; };
constexpr size_t GRAPH_BYTES_A_LAUNCH = 512;
struct Event {
    Stream* recorded_on = nullptr;
    u64 pending = 0;  // records still queued
    bool timed = false;
    std::chrono::steady_clock::time_point passed{};
};
struct Function { std::string name; const emulation::Kernel* kernel; int dynamic_max; };
struct Module { std::string name; std::map<std::string, std::unique_ptr<Function>> functions; };
struct Program { std::string source, options, image, log; };

std::map<uintptr_t, size_t> device_memory, pinned_memory;
std::set<Stream*> streams;
std::map<void*, std::shared_ptr<Event>> events;
std::set<Module*> modules;
std::set<Program*> programs;
std::set<Graph*> graphs;
std::set<GraphExec*> graph_execs;
u64 graph_launches = 0;
std::set<void*> blas_handles, descriptions;  // of `blas.cc`
u64 blas_products = 0;
u64 calls = 0, fail_at = 0, launches = 0, contexts = 0;
int fail_code = 0, failed = 0;
constexpr size_t SPARSE = size_t(1) << 30;
size_t used = 0, limit = size_t(1) << 34;
bool initialized = false;
std::string last_call;

int begin(const char* name) {
    calls++;
    if (fail_at && calls == fail_at) {
        failed++;
        last_call = name;
        return fail_code;
    }
    return 0;
}
#define BEGIN                                              \
    std::lock_guard<std::recursive_mutex> guard(lock);     \
    if (int code = begin(__func__)) return code;           \
    if (!initialized) return 3;

// Calls that would wait or touch memory break the captures that this thread has begun.
bool captures() {
    bool any = false;
    for (Stream* stream : streams)
        if (stream->capture && stream->capture->thread == std::this_thread::get_id())
            any = stream->capture->broken = true;
    return any;
}
#define BEGIN_OUTSIDE_CAPTURE \
    BEGIN                     \
    if (captures()) return 900;

void run_one(Stream* stream);
void run_until(Event& event) {
    while (event.pending && event.recorded_on) run_one(event.recorded_on);
}
void run_one(Stream* stream) {
    if (stream->queue.empty()) return;
    Op op = std::move(stream->queue.front());
    stream->queue.pop_front();
    if (op.waits_for) run_until(*op.waits_for);
    if (op.run) op.run();
    if (op.records) {
        op.records->pending--;
        op.records->passed = std::chrono::steady_clock::now();
    }
}
void run_all(Stream* stream) { while (!stream->queue.empty()) run_one(stream); }
void run_everything() { for (Stream* stream : streams) run_all(stream); }
bool inside(const std::map<uintptr_t, size_t>& memory, uintptr_t at, size_t bytes) {
    auto next = memory.upper_bound(at);
    if (next == memory.begin()) return false;
    --next;
    return at + bytes <= next->first + next->second;
}
int enqueue(void* stream, std::function<void()> run) {
    if (!streams.count((Stream*)stream)) return 400;
    if (Capture* capture = ((Stream*)stream)->capture.get()) {
        if (capture->broken) return 901;
        capture->work.push_back(std::move(run));
        return 0;
    }
    ((Stream*)stream)->queue.push_back({std::move(run), nullptr, nullptr});
    return 0;
}
}  // namespace

CALL(mock_fail_at, u64 n, int code) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    fail_at = n ? calls + n : 0;
    fail_code = code;
    failed = 0;
    return 0;
}
CALL(mock_limit, size_t bytes) { limit = bytes; return 0; }
struct Report { u64 calls, launches, device_blocks, device_bytes, pinned, streams, events, modules, programs, contexts, failed, graphs, graph_launches, library, products; };
CALL(mock_report, Report* out) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    *out = {calls, launches, device_memory.size(), used, pinned_memory.size(), streams.size(),
            events.size(), modules.size(), programs.size(), contexts, (u64)failed,
            graphs.size() + graph_execs.size(), graph_launches,
            blas_handles.size() + descriptions.size(), blas_products};
    return 0;
}
extern "C" const char* mock_failed_call() { return last_call.c_str(); }

CALL(cuInit, unsigned) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (int code = begin(__func__)) return code;
    initialized = true;
    return getenv("MOCK_NO_DEVICE") ? 100 : 0;
}
CALL(cuDriverGetVersion, int* version) { BEGIN *version = 12000; return 0; }
CALL(cuDeviceGetCount, int* count) { BEGIN *count = 2; return 0; }
CALL(cuDeviceGet, int* device, int ordinal) { BEGIN if (ordinal > 1) return 101; *device = ordinal; return 0; }
CALL(cuDeviceGetName, char* name, int len, int) { BEGIN snprintf(name, len, "Emulated"); return 0; }
CALL(cuDeviceGetAttribute, int* value, int attribute, int) {
    BEGIN
    switch (attribute) {
        case 16: *value = 4; break;        // multiprocessors
        case 75: *value = 8; break;        // major
        case 76: *value = 0; break;        // minor
        case 97: *value = 163 << 10; break;  // shared memory a block can opt into
        default: return 1;
    }
    return 0;
}
CALL(cuDevicePrimaryCtxRetain, void** context, int device) { BEGIN *context = (void*)(uintptr_t)(device + 1); contexts++; return 0; }
CALL(cuDevicePrimaryCtxRelease_v2, int) { BEGIN contexts--; return 0; }
CALL(cuCtxSetCurrent, void*) { BEGIN return 0; }
CALL(cuCtxSynchronize) { BEGIN_OUTSIDE_CAPTURE run_everything(); return 0; }
CALL(cuGetErrorName, int code, const char** name) {
    *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 100 ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_MOCK";
    return 0;
}
CALL(cuGetErrorString, int code, const char** text) {
    *text = code == 2 ? "out of memory" : code == 100 ? "no CUDA-capable device is detected" : "made to fail";
    return 0;
}
CALL(cuMemGetInfo_v2, size_t* free, size_t* total) { BEGIN *free = limit - used; *total = limit; return 0; }
CALL(cuMemAlloc_v2, u64* out, size_t bytes) {
    BEGIN_OUTSIDE_CAPTURE
    if (bytes == 0) return 1;
    if (used + bytes > limit) return 2;
    void* at = nullptr;
    if (bytes >= SPARSE) {
        // More than the machine may have: pages come when they are touched.
        at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) return 2;
    } else {
        // Aligned, and with nothing of ours behind it, so that AddressSanitizer sees the end.
        if (posix_memalign(&at, 256, bytes)) return 2;
        memset(at, 0xff, bytes);
    }
    device_memory[(uintptr_t)at] = bytes;
    used += bytes;
    *out = (u64)at;
    return 0;
}
CALL(cuMemFree_v2, u64 at) {
    BEGIN_OUTSIDE_CAPTURE
    run_everything();
    auto found = device_memory.find(at);
    if (found == device_memory.end()) return 1;
    const size_t bytes = found->second;
    used -= bytes;
    device_memory.erase(found);
    if (bytes >= SPARSE) munmap((void*)at, bytes);
    else free((void*)at);
    return 0;
}
CALL(cuMemHostAlloc, void** out, size_t bytes, unsigned) {
    BEGIN_OUTSIDE_CAPTURE
    if (posix_memalign(out, 4096, bytes)) return 2;
    memset(*out, 0xff, bytes);
    pinned_memory[(uintptr_t)*out] = bytes;
    return 0;
}
CALL(cuMemFreeHost, void* at) {
    BEGIN_OUTSIDE_CAPTURE
    run_everything();
    if (!pinned_memory.erase((uintptr_t)at)) return 1;
    free(at);
    return 0;
}
CALL(cuMemHostRegister_v2, void* at, size_t bytes, unsigned) {
    BEGIN_OUTSIDE_CAPTURE
    if (!pinned_memory.emplace((uintptr_t)at, bytes).second) return 712;
    return 0;
}
CALL(cuMemHostUnregister, void* at) {
    BEGIN_OUTSIDE_CAPTURE
    run_everything();
    return pinned_memory.erase((uintptr_t)at) ? 0 : 713;
}
CALL(cuMemcpyHtoDAsync_v2, u64 to, const void* from, size_t bytes, void* stream) {
    BEGIN
    if (!inside(device_memory, to, bytes) || !inside(pinned_memory, (uintptr_t)from, bytes)) return 1;
    return enqueue(stream, [=] { memcpy((void*)to, from, bytes); });
}
struct Copy2D {
    size_t from_x, from_y;
    int from_type;
    const char* from_host;
    u64 from_device;
    void* from_array;
    size_t from_pitch, to_x, to_y;
    int to_type;
    char* to_host;
    u64 to_device;
    void* to_array;
    size_t to_pitch, width, height;
};
CALL(cuMemcpy2DAsync_v2, const Copy2D* given, void* stream) {
    BEGIN
    const Copy2D c = *given;
    if (c.from_type != 1 || c.to_type != 2 || c.from_x || c.from_y || c.to_x || c.to_y) return 1;
    if (!c.height || !c.width || c.from_pitch < c.width || c.to_pitch < c.width) return 1;
    if (c.from_pitch > 0x7fffffff || c.to_pitch > 0x7fffffff) return 1;
    const size_t from_bytes = (c.height - 1) * c.from_pitch + c.width;
    const size_t to_bytes = (c.height - 1) * c.to_pitch + c.width;
    if (!inside(device_memory, c.to_device, to_bytes)) return 1;
    if (!inside(pinned_memory, (uintptr_t)c.from_host, from_bytes)) return 1;
    return enqueue(stream, [=] {
        for (size_t i = 0; i < c.height; i++)
            memcpy((char*)c.to_device + i * c.to_pitch, c.from_host + i * c.from_pitch, c.width);
    });
}
CALL(cuMemcpyDtoHAsync_v2, void* to, u64 from, size_t bytes, void* stream) {
    BEGIN
    if (!inside(device_memory, from, bytes) || !inside(pinned_memory, (uintptr_t)to, bytes)) return 1;
    return enqueue(stream, [=] { memcpy(to, (const void*)from, bytes); });
}
CALL(cuMemcpyDtoDAsync_v2, u64 to, u64 from, size_t bytes, void* stream) {
    BEGIN
    if (!inside(device_memory, from, bytes) || !inside(device_memory, to, bytes)) return 1;
    return enqueue(stream, [=] { memmove((void*)to, (const void*)from, bytes); });
}
CALL(cuMemsetD8Async, u64 to, unsigned char value, size_t bytes, void* stream) {
    BEGIN
    if (!inside(device_memory, to, bytes)) return 1;
    return enqueue(stream, [=] { memset((void*)to, value, bytes); });
}
CALL(cuStreamCreate, void** out, unsigned) {
    BEGIN
    Stream* stream = new Stream;
    streams.insert(stream);
    *out = stream;
    return 0;
}
CALL(cuStreamDestroy_v2, void* stream) {
    BEGIN
    if (!streams.count((Stream*)stream)) return 400;
    run_all((Stream*)stream);
    for (auto& [_, event] : events)
        if (event->recorded_on == stream) event->recorded_on = nullptr;
    streams.erase((Stream*)stream);
    delete (Stream*)stream;
    return 0;
}
CALL(cuStreamSynchronize, void* stream) {
    BEGIN_OUTSIDE_CAPTURE
    if (!streams.count((Stream*)stream)) return 400;
    run_all((Stream*)stream);
    return 0;
}
CALL(cuStreamWaitEvent, void* stream, void* event, unsigned) {
    BEGIN
    if (!streams.count((Stream*)stream) || !events.count(event)) return 400;
    if (((Stream*)stream)->capture) return 900;
    ((Stream*)stream)->queue.push_back({nullptr, events[event], nullptr});
    return 0;
}
CALL(cuEventCreate, void** out, unsigned flags) {
    BEGIN
    auto event = std::make_shared<Event>();
    event->timed = !(flags & 2);
    *out = event.get();
    events[*out] = event;
    return 0;
}
CALL(cuEventRecord, void* event, void* stream) {
    BEGIN
    if (!streams.count((Stream*)stream) || !events.count(event)) return 400;
    if (((Stream*)stream)->capture) return 900;
    events[event]->recorded_on = (Stream*)stream;
    events[event]->pending++;
    ((Stream*)stream)->queue.push_back({nullptr, nullptr, events[event]});
    return 0;
}
CALL(cuEventQuery, void* event) {
    BEGIN_OUTSIDE_CAPTURE
    if (!events.count(event)) return 400;
    Event& asked = *events[event];
    if (!asked.pending) return 0;
    // The device goes on by itself, a little at a time.
    if (asked.recorded_on) run_one(asked.recorded_on);
    return 600;
}
CALL(cuEventSynchronize, void* event) {
    BEGIN_OUTSIDE_CAPTURE
    if (!events.count(event)) return 400;
    run_until(*events[event]);
    return 0;
}
CALL(cuEventElapsedTime, float* milliseconds, void* from, void* to) {
    BEGIN
    if (!events.count(from) || !events.count(to)) return 400;
    const Event &a = *events[from], &b = *events[to];
    if (!a.timed || !b.timed || !a.recorded_on || !b.recorded_on) return 400;
    if (a.pending || b.pending) return 600;
    *milliseconds = std::chrono::duration<float, std::milli>(b.passed - a.passed).count();
    return 0;
}
CALL(cuEventDestroy_v2, void* event) { BEGIN return events.erase(event) ? 0 : 400; }

// An image is text: "//module OPTIONS" and whatever follows, as the prebuilt one.
CALL(cuModuleLoadData, void** out, const void* image) {
    BEGIN_OUTSIDE_CAPTURE
    std::string text((const char*)image), first = text.substr(0, text.find('\n'));
    const std::string mark = "//module ";
    if (first.compare(0, mark.size(), mark) != 0) return 218;
    const std::string name = first.substr(mark.size());
    if (!emulation::modules().count(name)) return 200;
    Module* module = new Module{name, {}};
    modules.insert(module);
    *out = module;
    return 0;
}
CALL(cuModuleUnload, void* module) {
    BEGIN_OUTSIDE_CAPTURE
    if (!modules.erase((Module*)module)) return 400;
    run_everything();
    delete (Module*)module;
    return 0;
}
CALL(cuModuleGetFunction, void** out, void* module, const char* name) {
    BEGIN
    if (!modules.count((Module*)module)) return 400;
    auto& kernels = emulation::modules()[((Module*)module)->name];
    if (!kernels.count(name)) return 500;
    auto& slot = ((Module*)module)->functions[name];
    slot.reset(new Function{name, &kernels[name], 48 << 10});
    *out = slot.get();
    return 0;
}
CALL(cuFuncSetAttribute, void* function, int attribute, int value) {
    BEGIN
    if (attribute != 8 || value > 163 << 10) return 1;
    ((Function*)function)->dynamic_max = value;
    return 0;
}
CALL(cuLaunchKernel, void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
     unsigned bz, unsigned shared, void* stream, void** args, void**) {
    BEGIN
    Function* f = (Function*)function;
    if (!gx || !gy || !gz || gy > 65535 || gz > 65535 || bx * by * bz > 1024) return 1;
    if ((int)shared > f->dynamic_max) return 1;
    launches++;
    // For programs that cannot call `mock_fail_at`: each so many-th launch fails.
    static const char* every = getenv("MOCK_FAIL_LAUNCHES");
    if (every && launches % strtoull(every, nullptr, 10) == 0) return 999;
    std::vector<char> copy((char*)args[0], (char*)args[0] + f->kernel->bytes);
    const std::string name = f->name;
    const emulation::Kernel* kernel = f->kernel;
    return enqueue(stream, [=] {
        emulation::launch(name.c_str(), *kernel, {gx, gy, gz}, {bx, by, bz}, shared, copy.data());
    });
}

CALL(cuStreamBeginCapture_v2, void* stream, int mode) {
    BEGIN
    if (!streams.count((Stream*)stream) || mode != 1) return 400;
    if (((Stream*)stream)->capture) return 401;
    ((Stream*)stream)->capture.reset(new Capture{{}, std::this_thread::get_id()});
    return 0;
}
CALL(cuStreamEndCapture, void* stream, void** out) {
    BEGIN
    if (!streams.count((Stream*)stream)) return 400;
    std::unique_ptr<Capture> capture = std::move(((Stream*)stream)->capture);
    *out = nullptr;
    if (!capture) return 401;
    if (capture->broken) return 901;
    if (capture->thread != std::this_thread::get_id()) return 908;
    Graph* graph = new Graph{std::move(capture->work)};
    graphs.insert(graph);
    *out = graph;
    return 0;
}
CALL(cuGraphInstantiateWithFlags, void** out, void* graph, u64 flags) {
    BEGIN
    if (!graphs.count((Graph*)graph) || flags) return 400;
    const size_t bytes = ((Graph*)graph)->work.size() * GRAPH_BYTES_A_LAUNCH;
    if (used + bytes > limit) return 2;
    used += bytes;
    GraphExec* exec = new GraphExec{((Graph*)graph)->work, bytes};
    graph_execs.insert(exec);
    *out = exec;
    return 0;
}
CALL(cuGraphUpload, void* exec, void* stream) {
    BEGIN
    return graph_execs.count((GraphExec*)exec) && streams.count((Stream*)stream) ? 0 : 400;
}
CALL(cuGraphLaunch, void* exec, void* stream) {
    BEGIN
    if (!graph_execs.count((GraphExec*)exec) || !streams.count((Stream*)stream)) return 400;
    graph_launches++;
    for (const auto& run : ((GraphExec*)exec)->work)
        if (int code = enqueue(stream, run)) return code;
    return 0;
}
CALL(cuGraphDestroy, void* graph) {
    BEGIN
    if (!graphs.erase((Graph*)graph)) return 400;
    delete (Graph*)graph;
    return 0;
}
CALL(cuGraphExecDestroy, void* exec) {
    BEGIN
    if (!graph_execs.erase((GraphExec*)exec)) return 400;
    run_everything();
    used -= ((GraphExec*)exec)->bytes;
    delete (GraphExec*)exec;
    return 0;
}

CALL(nvrtcVersion, int* major, int* minor) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (begin(__func__)) return 9;
    *major = 12; *minor = 9;
    return 0;
}
#define NVRTC_BEGIN                                        \
    std::lock_guard<std::recursive_mutex> guard(lock);     \
    if (begin(__func__)) return 9;
CALL(nvrtcCreateProgram, void** out, const char* source, const char*, int headers, void*, void*) {
    NVRTC_BEGIN
    if (headers) return 3;
    Program* program = new Program;
    program->source = source;
    programs.insert(program);
    *out = program;
    return 0;
}
CALL(nvrtcCompileProgram, void* handle, int count, const char** options) {
    NVRTC_BEGIN
    Program* program = (Program*)handle;
    std::string defines;
    bool architecture = false;
    for (int i = 0; i < count; i++) {
        const std::string option = options[i];
        if (option.compare(0, 2, "-D") == 0) defines += (defines.empty() ? "" : " ") + option;
        architecture |= option == "--gpu-architecture=compute_80";
    }
    if (!architecture || program->source.find("KERNEL(") == std::string::npos) {
        program->log = "no architecture, or no source of ours";
        return 6;
    }
    program->image = "//module " + defines + "\n";
    return 0;
}
CALL(nvrtcGetPTXSize, void* program, size_t* size) { NVRTC_BEGIN *size = ((Program*)program)->image.size() + 1; return 0; }
CALL(nvrtcGetPTX, void* program, char* out) { NVRTC_BEGIN memcpy(out, ((Program*)program)->image.c_str(), ((Program*)program)->image.size() + 1); return 0; }
CALL(nvrtcGetProgramLogSize, void* program, size_t* size) { NVRTC_BEGIN *size = ((Program*)program)->log.size() + 1; return 0; }
CALL(nvrtcGetProgramLog, void* program, char* out) { NVRTC_BEGIN strcpy(out, ((Program*)program)->log.c_str()); return 0; }
CALL(nvrtcDestroyProgram, void** program) { NVRTC_BEGIN programs.erase((Program*)*program); delete (Program*)*program; *program = nullptr; return 0; }
