"""Score every model type of transformers and record which are exact."""
