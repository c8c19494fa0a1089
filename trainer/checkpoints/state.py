"""Collect all that training carries on, and bring it back: weights, optimizer, schedule, random states.

Tensors go by the names they have in the model however it is sharded, so that another number of processes reads them.
Weights that do not train come from the model's own checkpoint, as at the beginning.
"""

import random
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ..policy import WHOLE, trained_state
from ..state import Trainer


def collect(trainer: Trainer) -> dict[str, Any]:
    """Collect tensors, whole and on the host of the first process, and plain values; all processes call this."""
    optimizer, device = trainer.optimizer, trainer.config.precision.device
    name, key, *rest = np.random.get_state()
    return {
        "weights": trained_state(trainer.policy),
        # torch would take a step to make the state of an optimizer that has none.
        "optimizer": get_optimizer_state_dict(trainer.policy, optimizer, options=WHOLE) if optimizer.state else {},
        "scheduler": trainer.scheduler.state_dict(),
        "python": random.getstate(),
        "numpy": (name, key.tolist(), *rest),  # type: ignore[attr-defined]
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore(trainer: Trainer, state: dict[str, Any]) -> None:
    """Bring a run that was just set up to where it was when `state` was collected."""
    policy, optimizer, device = trainer.policy, trainer.optimizer, trainer.config.precision.device
    set_model_state_dict(policy, state["weights"], options=WHOLE)
    if state["optimizer"]:
        set_optimizer_state_dict(policy, optimizer, state["optimizer"], options=WHOLE)
        for name, parameter in trainer.trained.items():
            if name not in state["optimizer"]["state"]:  # it never had a gradient; torch gave it a state all the same
                optimizer.state.pop(parameter, None)
    trainer.scheduler.load_state_dict(state["scheduler"])
    for group, rate in zip(optimizer.param_groups, trainer.scheduler.get_last_lr(), strict=True):
        group |= {"lr": rate, "betas": tuple(group["betas"])}  # which torch has made a list
    trainer.engine.weights_changed()
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
