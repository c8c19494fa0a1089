"""Analyse the credit of logged completions: tables by pandas."""
