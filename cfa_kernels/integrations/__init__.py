"""Credit for trainers that other packages provide, one module per package; each is imported on demand."""
