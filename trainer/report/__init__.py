"""Show and record a run: console, run folder, logging back-ends; the first process reports for all."""

from trainer.report.run_report import Report, Silence

__all__ = ["Report", "Silence"]
