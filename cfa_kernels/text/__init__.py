"""Readers of completions.

Modules here know token ids, tokenizers and text, but no models. They find answers, spans and offsets.
"""
