"""One file per kind of layer, without torch: sizes, names of tensors, shards, memory. The rest: compute/layers."""
