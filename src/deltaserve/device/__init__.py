"""F2: a rank's memory (pages, page tables) and attention over it. One code path for CPU and CUDA."""
