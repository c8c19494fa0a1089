"""Sample with transformers' continuous batching, which takes a completion's place as soon as it has ended."""
