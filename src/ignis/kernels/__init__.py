"""The kernel language and the kernels written in it."""
