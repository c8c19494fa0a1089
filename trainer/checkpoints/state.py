"""Write all that a run needs to go on to a folder, and read it back: weights, optimizer, schedule, random states.

Tensors go by the names they have in the model however it is wrapped or sharded, so that another number of processes
reads them. Weights that do not train come from the model's own checkpoint, as at the beginning.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from trainer.checkpoints.files import Damaged
from trainer.processes import is_first
from trainer.state import Trainer

WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
Tensors = dict[str, dict[str, Tensor]]
"""Tensors by name, by the file that they go into."""
# On the host; one copy of tensors that are sharded, by the process of rank 0.
_WHOLE: dict[str, Any] = {"full_state_dict": True, "cpu_offload": True, "ignore_frozen_params": True}


def tensors_of(trainer: Trainer) -> Tensors:
    """Collect what a run keeps of weights and optimizer, whole and on the host of the first process; all call this."""
    policy, optimizer = trainer.policy, trainer.optimizer
    options = StateDictOptions(**_WHOLE)
    weights: dict[str, Any] = get_model_state_dict(policy, options=options)
    moments: dict[str, Any] = {}
    if optimizer.state:  # asked for those of an optimizer without any, torch would take a step
        moments = get_optimizer_state_dict(policy, optimizer, options=options).get("state", {})  # type: ignore[assignment]
    flat = {f"{key}/{name}": value for name, of_weight in moments.items() for key, value in of_weight.items()}
    kept = {WEIGHTS: {name: weights[name] for name in trainer.trained} if is_first() else {}, OPTIMIZER: flat}
    return {file: {name: value.contiguous() for name, value in tensors.items()} for file, tensors in kept.items()}


def write_state(trainer: Trainer, folder: Path, tensors: Tensors, state: dict[str, Any]) -> None:
    """Write a run as it is after a step to an empty folder; `state`, JSON, is what the rest of the program keeps."""
    for file, named in tensors.items():
        save_file(named, folder / file)
    kept = {"scheduler": trainer.scheduler.state_dict(), "random": random_states(trainer.config.precision.device)}
    (folder / STATE).write_text(json.dumps(state | kept), encoding="utf-8")


def read_json(folder: Path) -> dict[str, Any]:
    """Read what a run kept beside its tensors."""
    return json.loads((folder / STATE).read_text(encoding="utf-8"))


def read_state(trainer: Trainer, folder: Path) -> None:
    """Bring a run that was just set up to where it was when `folder` was written.

    Raises:
        Damaged: its tensors are not the model's; the message names some.
    """
    policy, optimizer = trainer.policy, trainer.optimizer
    weights: dict[str, Any] = load_file(folder / WEIGHTS)
    moments = load_file(folder / OPTIMIZER)
    own, state = trainer.trained, read_json(folder)
    if others := {(name, x.shape) for name, x in own.items()} ^ {(name, x.shape) for name, x in weights.items()}:
        raise Damaged(f"{folder / WEIGHTS}: not the model's weights: {sorted({name for name, _ in others})[:3]}")
    options = StateDictOptions(**_WHOLE, strict=False)  # frozen and tied weights are not there
    set_model_state_dict(policy, weights, options=options)
    if moments:
        by_name: dict[str, dict[str, Tensor]] = {}
        for name, value in moments.items():
            key, _, of = name.partition("/")
            by_name.setdefault(of, {})[key] = value.clone()  # the file may go
        groups = optimizer.state_dict()["param_groups"]
        named = [{**group, "params": [list(own)[i] for i in group["params"]]} for group in groups]
        whole: dict[str, Any] = {"state": by_name, "param_groups": named}
        set_optimizer_state_dict(policy, optimizer, whole, options=options)
        for group, before in zip(optimizer.param_groups, groups, strict=True):  # betas have become a list
            group.update({name: value for name, value in before.items() if name != "params"})
        for name, parameter in own.items():
            if name not in by_name:  # it never had a gradient; torch gave it a state all the same
                optimizer.state.pop(parameter, None)
    trainer.scheduler.load_state_dict(state["scheduler"])
    for group, rate in zip(optimizer.param_groups, trainer.scheduler.get_last_lr(), strict=True):
        group["lr"] = rate
    trainer.engine.weights_changed()
    set_random_states(state["random"], trainer.config.precision.device)


def random_states(device: torch.device) -> dict[str, Any]:
    """Collect the states of all global random number generators, as JSON."""
    version, words, normal = random.getstate()
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    states = {"torch": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return {
        "python": [version, list(words), normal],
        "numpy": numpy | {"state": {"key": numpy["state"]["key"].tolist(), "pos": numpy["state"]["pos"]}},
        **{name: bytes(state.tolist()).hex() for name, state in states.items()},
    }


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Give all global random number generators the states that `random_states` collected."""
    version, words, normal = states["python"]
    random.setstate((version, tuple(words), normal))
    numpy = states["numpy"]
    np.random.set_state(numpy | {"state": {**numpy["state"], "key": np.array(numpy["state"]["key"], np.uint32)}})
    torch.set_rng_state(_as_state(states["torch"]))
    if "device" in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(_as_state(states["device"]), device)


def _as_state(written: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(written), dtype=torch.uint8)
