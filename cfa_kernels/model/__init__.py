"""Access to transformers models.

Modules here know transformers and PEFT. They patch a model, recognise its parts, and limit its inputs.
README.md lists every patch.
"""
