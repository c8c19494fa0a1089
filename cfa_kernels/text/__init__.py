"""Readers of completions.

A module here knows token ids, tokenizers and text, and no model; what belongs here finds answers, spans and offsets.
"""
