"""What grows with the number of GPUs: packs replayed over ranks, times by a named cost, what a CPU can measure."""
