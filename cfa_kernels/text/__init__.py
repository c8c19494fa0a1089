"""Readers of completions: answers, spans and offsets from token ids and text, without models."""
