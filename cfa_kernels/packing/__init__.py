"""Layouts of token sequences.

A module here knows token ids, no model and no GPU; what belongs here lays sequences out as a prefix tree or cuts a
tree into packs.
"""
