"""Train the model that methods are judged on, on right solutions, and make the random one that must show nothing."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, Qwen3ForCausalLM

from benchmarks.demo_model.warmup import WarmupConfig, warm_up
from benchmarks.evidence.problems import training_rows

TRAINED, RANDOM = MODELS = ("trained", "random")
RECIPE = {"vocab_size": 512, "max_steps": 2400, "batch_size": 16, "max_position_embeddings": 512}
"""Settings of the model; the rest is the embedded one's."""


@dataclass(frozen=True)
class Subject:
    """A model to be asked, in eval mode on the CPU.

    Attributes:
        name: one of `MODELS`.
        fingerprint: a digest of its weights.
        accuracy: greedy, on held-out problems; None where it was not measured.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str
    accuracy: float | None


def train(folder: Path) -> Path:
    """The trained model's folder below `folder`, made if it is not there: some twelve minutes of one core."""
    target = folder / "model"
    if (target / "warmup.json").exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    rows = training_rows("train", 0, RECIPE["max_steps"] * RECIPE["batch_size"])
    data = {"dataset": rows, "eval_dataset": training_rows("test", 0, 400, short=0)}
    for name, rows in data.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    files = {name: str(folder / f"{name}.jsonl") for name in data}
    warm_up(WarmupConfig(output_dir=str(target), **files, **RECIPE))
    return target


def load(folder: Path, name: str, *, seed: int = 0) -> Subject:
    """The trained model of a folder, or one of its shape with random weights."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    accuracy = json.loads((folder / "warmup.json").read_text(encoding="utf-8"))["held_out_accuracy"]
    if name == RANDOM:
        torch.manual_seed(seed)
        model, accuracy = Qwen3ForCausalLM(model.config), None
    return Subject(name, model.eval(), tokenizer, fingerprint(model), accuracy)


def fingerprint(model: PreTrainedModel) -> str:
    """A digest of every weight."""
    digest = hashlib.sha256()
    for key, value in sorted(model.state_dict().items()):
        digest.update(key.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
