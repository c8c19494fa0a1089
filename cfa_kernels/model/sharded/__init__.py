"""Recognise models that processes share, their pieces of weights, and the processes themselves."""
