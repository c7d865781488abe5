// Writes llama.cpp's logits of all positions of a reference file, for make_reference.py compare.
//
//   g++ -O2 -std=c++17 -ILLAMA/include -ILLAMA/ggml/include llama_logits.cpp libllama.a libggml.a \
//       libggml-cpu.a libggml-base.a -fopenmp -lpthread -ldl -lm -o llama_logits
//   ./llama_logits MODEL.gguf smollm2.ref OUT.f32
#include "llama.h"
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

static uint32_t number(FILE* f, int bytes) {
  uint32_t n = 0;
  for (int i = 0; i < bytes; i++) n |= uint32_t(fgetc(f)) << (8 * i);
  return n;
}

int main(int argc, char** argv) {
  if (argc != 4) return fprintf(stderr, "usage: llama_logits MODEL REFERENCE OUT\n"), 2;
  llama_backend_init();
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  auto mp = llama_model_default_params();
  mp.n_gpu_layers = 0;
  auto* model = llama_model_load_from_file(argv[1], mp);
  auto cp = llama_context_default_params();
  cp.n_ctx = 2048, cp.n_batch = 2048, cp.n_ubatch = 512, cp.n_threads = cp.n_threads_batch = 2;
  auto* context = llama_init_from_model(model, cp);
  int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
  FILE* in = fopen(argv[2], "rb");
  FILE* out = fopen(argv[3], "wb");
  char magic[8];
  if (!in || !out || fread(magic, 1, 8, in) != 8 || memcmp(magic, "RSREF1\0\0", 8)) return 1;
  uint32_t sequences = number(in, 4), top = number(in, 4);
  auto batch = llama_batch_init(2048, 0, 1);
  while (sequences--) {
    uint32_t n = number(in, 4);
    llama_memory_clear(llama_get_memory(context), true);
    batch.n_tokens = n;
    for (uint32_t i = 0; i < n; i++) {
      batch.token[i] = number(in, 2), batch.pos[i] = i, batch.n_seq_id[i] = 1;
      batch.seq_id[i][0] = 0, batch.logits[i] = true;
    }
    fseek(in, long(n) * (4 + top * 6), SEEK_CUR);
    if (llama_decode(context, batch)) return 1;
    for (uint32_t i = 0; i < n; i++) fwrite(llama_get_logits_ith(context, i), 4, vocab, out);
  }
  fclose(out);
}
