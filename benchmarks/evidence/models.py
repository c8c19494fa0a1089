"""Train the model that methods are judged on, on right solutions, and make the random one that must show nothing.

The trained model is kept in a folder of its own and is made again only where there is none.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, Qwen3ForCausalLM

from benchmarks.demo_model.warmup import WarmupConfig, warm_up
from benchmarks.evidence.problems import training_rows

TRAINED, RANDOM = "trained", "random"
MODELS = (TRAINED, RANDOM)


ROWS, HELD_OUT = 96_000, 200
RECIPE = {
    "vocab_size": 640, "single_digits": False, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 384, "max_steps": 3000, "warmup_steps": 100, "batch_size": 32, "learning_rate": 2e-3,
    "seed": 0,
}  # fmt: skip
"""Settings of the training: a Qwen3 of four layers, on solutions of `problems.training_rows`.

Its tokenizer takes a number for one token, and in the problems a number stands right behind its owner: what has been
looked up is then what follows the same token elsewhere, which a model of this size learns in minutes.
"""


@dataclass(frozen=True)
class Subject:
    """A model to be asked, in eval mode on the CPU, and what it is.

    Attributes:
        name: "trained" or "random".
        fingerprint: of its weights; results of other weights are never mixed with its own.
        accuracy: greedy, on held-out problems; None where it was not measured.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str
    accuracy: float | None


def train(folder: Path) -> Path:
    """The trained model's folder below `folder`, made if it is not there: some thirty minutes of one core."""
    target = folder / "model"
    if (target / "warmup.json").exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    data = {"dataset": training_rows("train", 0, ROWS)}
    data["eval_dataset"] = training_rows("test", 0, HELD_OUT, cut=0.0, implicit=0.0)
    for name, rows in data.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    files = {name: str(folder / f"{name}.jsonl") for name in data}
    warm_up(WarmupConfig(output_dir=str(target), **files, **RECIPE))  # type: ignore[arg-type]
    return target


def load(folder: Path, name: str, *, seed: int = 0) -> Subject:
    """The trained model of a folder, or one of its shape with random weights.

    Raises:
        ValueError: another name.
    """
    if name not in MODELS:
        raise ValueError(f"model must be one of {MODELS}, got {name!r}")
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    accuracy = None
    if name == RANDOM:
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(model.config)
    else:
        record: dict[str, Any] = json.loads((folder / "warmup.json").read_text(encoding="utf-8"))
        accuracy = record["held_out_accuracy"]
    return Subject(name, model.eval(), tokenizer, fingerprint(model), accuracy)


def fingerprint(model: PreTrainedModel) -> str:
    """A digest of every weight."""
    digest = hashlib.sha256()
    for key, value in sorted(model.state_dict().items()):
        digest.update(key.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
