"""Reward completions and turn rewards into advantages."""
