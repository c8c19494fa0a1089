"""Sample completions: an engine takes prompts with their keys and returns `Rollouts` (`engine.py`)."""
