"""Access to transformers models.

Modules here know transformers and PEFT. They patch a model, find out what it is, and limit what it is fed.
README.md lists every patch.
"""
