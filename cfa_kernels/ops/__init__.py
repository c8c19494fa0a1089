"""Kernels and their plain PyTorch references, a file for each family; modules here know torch and triton only."""
