"""Log-probs of packed tokens and other outcomes, with or without gradients; modules know models through `model`."""
