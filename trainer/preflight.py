"""Refuse, before the model is loaded, what can be known to fail then."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from trainer.config import TrainConfig, model_path
from trainer.report.trackers import tracker_library
from trainer.rollouts.vllm.engine import await_server


def check_before_loading(config: TrainConfig) -> None:
    """Check what a run is given by name: trackers, device, the model's files, a server.

    Raises:
        ValueError, OSError, ImportError, NotImplementedError: the message names the setting and says what is wrong.
    """
    for name in config.report_to:
        tracker_library(name)
    _require_device(config.precision.device)
    _require_model_files(config.model, Path(model_path(config.model)))
    if config.rollout_engine == "vllm":
        await_server(config.vllm_server_base_url.rstrip("/"), config.vllm_server_timeout)


def _require_device(device: torch.device) -> None:
    """Raise `ValueError` unless a number can be put on the device and read from it."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as problem:  # the latter of a PyTorch that was built without CUDA
        there = f"{torch.cuda.device_count()} GPUs" if torch.cuda.is_available() else "no GPU that PyTorch can use"
        reason = str(problem).partition("\n")[0]
        raise ValueError(f"device: {device} cannot be used: {reason}; this machine has {there}") from problem


def _require_model_files(name: str, folder: Path) -> None:
    """Raise unless a model's folder has what is read from it; a hub name is left to the hub.

    Of weights in safetensors only the header is read, which says how long the file must be.
    """
    if folder.is_file():
        raise NotADirectoryError(f"model {name}: is a file; name a folder, or a model on the hub")
    if not folder.is_dir():
        if folder.is_absolute() or name.startswith(".") or len(folder.parts) > 2:
            raise FileNotFoundError(f"model {name}: there is no such folder")
        return
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"model {name}: its folder has no config.json")
    index = folder / "model.safetensors.index.json"
    weights = ["model.safetensors"]
    if index.is_file():
        try:
            weights = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise ValueError(f"model {name}: {index} is not an index of weights: {problem!r}") from problem
        if absent := [file for file in weights if not (folder / file).is_file()]:
            raise FileNotFoundError(f"model {name}: {index} names {absent[0]}, which is not there")
    elif not (folder / weights[0]).is_file():
        if not list(folder.glob("*.bin")):
            raise FileNotFoundError(f"model {name}: its folder has no weights, expected {folder / weights[0]}")
        return
    for file in weights:
        try:
            with safe_open(folder / file, "pt"):
                pass
        except SafetensorError as problem:
            raise ValueError(
                f"model {name}: {folder / file} is not whole safetensors: {problem}; copy or download it again"
            ) from problem
