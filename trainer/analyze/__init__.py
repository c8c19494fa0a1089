"""Analyse the credit of logged completions: tables, figures and a page of shaded tokens."""
