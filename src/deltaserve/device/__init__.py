"""F2: a rank's memory (pages, page tables, aux slots) and attention over it. One code path for CPU and CUDA."""
