"""Kernels and their plain PyTorch references.

Modules here know torch and triton only. Each family of kernels has one file with its kernel, launcher, operator and
reference.
"""
