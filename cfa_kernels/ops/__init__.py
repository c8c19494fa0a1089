"""Kernels that several concepts share, and their plain PyTorch references; modules know torch and triton only."""
