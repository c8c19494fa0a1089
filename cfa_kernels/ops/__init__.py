"""Kernels: one file per family, with its Triton kernels and its plain PyTorch reference."""
