"""The time of a training step, explained: what is counted, and what it takes at named rates.

Nothing is computed here and no device is needed: the program's own step runs on tensors without memory (torch's `meta`
device), every operator that it dispatches is counted, and a roofline turns counts into seconds.
"""
