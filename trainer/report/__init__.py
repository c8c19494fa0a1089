"""Show what a run does and write it down: console, run folder, curves, logging back-ends.

A run on several devices reports from one of them: what they measured is summed up before it comes here.
"""

from trainer.report.metrics import Step
from trainer.report.run_report import Report

__all__ = ["Report", "Step"]
