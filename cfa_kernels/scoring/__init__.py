"""Log-probs of packed tokens.

A module here knows models through `hf`; what belongs here asks a model for log-probs or other outcomes, with or
without gradients.
"""
