// llama.cpp's half of the pair with plugin/engine/examples/bench.rs: the same token ids, step
// sizes and batch shapes over llama_decode. Built and driven by llama_pair.py.
//
//   llama_pair MODEL.gguf THREADS
//
// Prints lines `NAME VALUE`: tokens a second, or milliseconds where the name says so; each the
// median of several runs. By wall clock; with one thread by the time the process ran, so that
// other work on the machine does not count.
#include "llama.h"
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <vector>

static clockid_t used = CLOCK_MONOTONIC;

static double seconds() {
  timespec time;
  clock_gettime(used, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}

struct Bench {
  llama_context* context;
  llama_batch batch = llama_batch_init(2048, 0, 1);

  void clear() { llama_memory_clear(llama_get_memory(context), true); }

  void add(int token, int position, int sequence, bool logits) {
    int i = batch.n_tokens++;
    batch.token[i] = token, batch.pos[i] = position, batch.logits[i] = logits;
    batch.n_seq_id[i] = 1, batch.seq_id[i][0] = sequence;
  }

  double decode() {
    double begin = seconds();
    if (llama_decode(context, batch)) exit(1);
    llama_synchronize(context);
    batch.n_tokens = 0;
    return seconds() - begin;
  }

  // The tokens bench.rs makes: `salt` tells sequences apart.
  double prompt(int tokens, int sequence) {
    for (int i = 0; i < tokens; i++) {
      add((i * 7919 + 11 + sequence) % 49000, i, sequence, i == tokens - 1);
    }
    return decode();
  }
};

static double median(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

int main(int argc, char** argv) {
  if (argc != 3) return fprintf(stderr, "usage: llama_pair MODEL THREADS\n"), 2;
  if (atoi(argv[2]) == 1) used = CLOCK_PROCESS_CPUTIME_ID;
  llama_backend_init();
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  auto model_params = llama_model_default_params();
  model_params.n_gpu_layers = 0;
  auto* model = llama_model_load_from_file(argv[1], model_params);
  if (!model) return fprintf(stderr, "cannot load %s\n", argv[1]), 1;
  auto params = llama_context_default_params();
  params.n_ctx = 8192, params.n_batch = 2048, params.n_ubatch = 512, params.n_seq_max = 16;
  params.n_threads = params.n_threads_batch = atoi(argv[2]), params.kv_unified = true;
  Bench bench{llama_init_from_model(model, params)};
  for (int tokens : {64, 512, 2048}) {
    std::vector<double> times;
    for (int run = 0; run < (tokens > 1000 ? 1 : 3); run++) {
      bench.clear();
      times.push_back(bench.prompt(tokens, 0));
    }
    printf("prefill%d %.1f\n", tokens, tokens / median(times));
    fflush(stdout);
  }
  for (int count : {1, 4, 8, 16}) {
    bench.clear();
    for (int sequence = 0; sequence < count; sequence++) bench.prompt(64, sequence);
    std::vector<double> times;
    for (int step = 0; step < 24; step++) {
      for (int i = 0; i < count; i++) bench.add(5 + i, 64 + step, i, true);
      times.push_back(bench.decode());
    }
    printf("decode-b%d %.1f\n", count, count / median(times));
    fflush(stdout);
  }
  bench.clear();
  double first = bench.prompt(1024, 0);
  std::vector<double> times;
  for (int run = 0; run < 3; run++) {
    llama_memory_seq_rm(llama_get_memory(bench.context), 0, 1024, -1);
    for (int i = 0; i < 64; i++) bench.add(100 + i, 1024 + i, 0, i == 63);
    times.push_back(bench.decode());
  }
  printf("first-turn-1024-ms %.1f\nsecond-turn-64-ms %.1f\n", first * 1e3, median(times) * 1e3);
}
