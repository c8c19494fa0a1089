"""Run `python -m benchmarks.research.demo_model`, see `warmup.py`."""

from trainer.extras import needed_by

with needed_by("python -m benchmarks.research.demo_model", "trainer"):
    from benchmarks.research.demo_model.warmup import main

if __name__ == "__main__":
    raise SystemExit(main())
