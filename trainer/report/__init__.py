"""Show and record what a run does: console, run folder, curves, logging back-ends.

A run on several devices reports from one of them: measurements are combined before they are passed to this package.
"""

from trainer.report.metrics import Step
from trainer.report.run_report import Report, Silence

__all__ = ["Report", "Silence", "Step"]
