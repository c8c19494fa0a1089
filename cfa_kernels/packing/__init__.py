"""Layouts of token sequences.

Modules here know token ids, but neither models nor GPUs. They lay sequences out as a prefix tree and cut it into packs.
"""
