// Requantizes a file: for llama.cpp's half of the pair its own best type, for kl.py any type.
//
//   llama_quantize MODEL.gguf OUT.gguf [TYPE]     a number of `enum llama_ftype`, 2 = Q4_0
#include <cstdlib>

#include "llama.h"

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  llama_backend_init();
  auto params = llama_model_quantize_default_params();
  params.allow_requantize = true;
  params.ftype = argc > 3 ? llama_ftype(atoi(argv[3])) : LLAMA_FTYPE_MOSTLY_Q4_0;
  return llama_model_quantize(argv[1], argv[2], &params);
}
