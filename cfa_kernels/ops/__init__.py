"""Kernels and their plain PyTorch references.

A module here knows torch and triton only; what belongs here is a kernel, its launcher, its operator and its reference,
one file for each family.
"""
