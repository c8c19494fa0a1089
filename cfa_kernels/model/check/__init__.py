"""Compare a packed forward with the model's own, once per structure."""
