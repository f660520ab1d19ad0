"""One file or a few per format of weights: safetensors, quantised safetensors, GGUF. None of them needs torch."""
