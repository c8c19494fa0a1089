"""The training program: `python -m trainer` trains, `python -m trainer.warmup` makes a small model."""
