// Requantizes a file for llama.cpp's half of the pair: its own best type, for speed alone.
//
//   llama_quantize MODEL.gguf OUT.gguf
#include "llama.h"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  llama_backend_init();
  auto params = llama_model_quantize_default_params();
  params.allow_requantize = true, params.ftype = LLAMA_FTYPE_MOSTLY_Q4_0;
  return llama_model_quantize(argv[1], argv[2], &params);
}
