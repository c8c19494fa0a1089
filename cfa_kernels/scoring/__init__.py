"""Log-probs of packed tokens.

Modules here know models through `hf`. They ask a model for log-probs or other outcomes, with or without gradients.
"""
