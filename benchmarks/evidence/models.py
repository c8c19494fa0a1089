"""Train the model that methods are judged on, on right solutions, and make the random one that must show nothing."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, Qwen3ForCausalLM

from benchmarks.evidence.problems import training_rows
from benchmarks.evidence.regimes import make

TRAINED, RANDOM = MODELS = ("trained", "random")
RECIPE = {"vocab_size": 512, "max_steps": 5000, "batch_size": 16, "max_position_embeddings": 512}
"""Settings of the model; the rest is the embedded one's."""


class Subject(NamedTuple):
    """A model to be asked, in eval mode on the CPU."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str
    accuracy: float | None  # greedy, on held-out problems; None where it was not measured


def train(folder: Path) -> Path:
    """The trained model's folder below `folder`, made if it is not there: some thirty minutes of one core."""
    count = RECIPE["max_steps"] * RECIPE["batch_size"]
    return make(folder, training_rows("train", 0, count), training_rows("test", 0, 400, short=0), RECIPE)


def load(folder: Path, name: str, *, seed: int = 0) -> Subject:
    """The trained model of a folder, or one of its shape with random weights."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    accuracy = json.loads((folder / "warmup.json").read_text(encoding="utf-8"))["held_out_accuracy"]
    if name == RANDOM:
        torch.manual_seed(seed)
        model, accuracy = Qwen3ForCausalLM(model.config), None
    return Subject(model.eval(), tokenizer, fingerprint(model), accuracy)


def fingerprint(model: PreTrainedModel) -> str:
    """A digest of every weight."""
    weights = b"".join(key.encode() + value.numpy().tobytes() for key, value in sorted(model.state_dict().items()))
    return hashlib.sha256(weights).hexdigest()[:16]
