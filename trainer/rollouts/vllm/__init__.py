"""Sample with a vLLM server: an engine that `pip install '.[vllm]'` brings and no other part of the trainer needs.

`settings.py` declares where the server is, `weights.py` names weights as vLLM does, `engine.py` is the engine.
"""
