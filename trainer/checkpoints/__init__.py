"""Keep a run so that the same command goes on from it, however it ended."""
