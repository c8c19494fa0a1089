"""Analyse the credit of logged completions: tables, figures and a page of shaded tokens."""

from trainer.analyze.analysis import write_analysis
from trainer.analyze.samples import read_samples

__all__ = ["read_samples", "write_analysis"]
