"""Floor 0: one file per kernel family, each with its Triton kernels and its plain PyTorch reference."""
