"""Access to transformers models.

A module here knows transformers, PEFT and Liger; what belongs here patches a model, asks what it is, or limits what it
is fed. README.md lists every patch.
"""
