"""A checkpoint without torch: family, sizes, tensors by name, shares of ranks. `checkpoint_config` reads one."""
