"""Collect all that training carries on, and bring it back: weights, optimizer, schedule, random states.

Tensors go by the names they have in the model however it is wrapped or sharded, so that another number of processes
reads them. Weights that do not train come from the model's own checkpoint, as at the beginning.
"""

import random
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from trainer.processes import is_first
from trainer.state import Trainer

# On the host; one copy of tensors that are sharded, by the process of rank 0.
_WHOLE: dict[str, Any] = {"full_state_dict": True, "cpu_offload": True, "ignore_frozen_params": True}


def collect(trainer: Trainer) -> dict[str, Any]:
    """Collect tensors, whole and on the host of the first process, and plain values; all processes call this."""
    policy, optimizer, options = trainer.policy, trainer.optimizer, StateDictOptions(**_WHOLE)
    weights = get_model_state_dict(policy, options=options)
    return {
        "weights": {name: weights[name] for name in trainer.trained} if is_first() else {},
        # torch would take a step to make the state of an optimizer that has none.
        "optimizer": get_optimizer_state_dict(policy, optimizer, options=options) if optimizer.state else {},
        "scheduler": trainer.scheduler.state_dict(),
        "random": _random_states(trainer.config.precision.device),
    }


def restore(trainer: Trainer, state: dict[str, Any]) -> None:
    """Bring a run that was just set up to where it was when `state` was collected."""
    policy, optimizer = trainer.policy, trainer.optimizer
    options = StateDictOptions(**_WHOLE, strict=False)  # frozen and tied weights are not there
    set_model_state_dict(policy, state["weights"], options=options)
    if state["optimizer"]:
        set_optimizer_state_dict(policy, optimizer, state["optimizer"], options=options)
        for name, parameter in trainer.trained.items():
            if name not in state["optimizer"]["state"]:  # it never had a gradient; torch gave it a state all the same
                optimizer.state.pop(parameter, None)
    trainer.scheduler.load_state_dict(state["scheduler"])
    for group, rate in zip(optimizer.param_groups, trainer.scheduler.get_last_lr(), strict=True):
        group |= {"lr": rate, "betas": tuple(group["betas"])}  # which torch has made a list
    trainer.engine.weights_changed()
    _set_random_states(state["random"], trainer.config.precision.device)


def _random_states(device: torch.device) -> dict[str, Any]:
    name, key, *rest = np.random.get_state()
    states = {"python": random.getstate(), "numpy": (name, torch.tensor(key.astype(np.int64)), *rest)}  # type: ignore[attr-defined]
    there = {} if device.type == "cpu" else {"device": torch.get_device_module(device).get_rng_state(device)}
    return states | {"torch": torch.get_rng_state()} | there


def _set_random_states(states: dict[str, Any], device: torch.device) -> None:
    name, key, *rest = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state((name, key.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if device.type != "cpu" and "device" in states:
        torch.get_device_module(device).set_rng_state(states["device"], device)
