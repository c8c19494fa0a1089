"""Train the model that methods are judged on, on right solutions, and make the random one that must show nothing.

The trained model is kept in a folder of its own and is made again only where there is none.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, Qwen3ForCausalLM

from benchmarks.demo_model.warmup import WarmupConfig, warm_up
from benchmarks.evidence.problems import training_rows

TRAINED, RANDOM = "trained", "random"
MODELS = (TRAINED, RANDOM)


@dataclass(frozen=True)
class Recipe:
    """Settings of the training: a Qwen3 of four layers, on solutions of `problems.training_rows`.

    Its tokenizer takes a number for one token, and in the problems a number stands right behind its owner: what has
    been looked up is then what follows the same token elsewhere, which a model of this size learns in minutes.
    """

    steps: int = 3000
    batch_size: int = 32
    rows: int = 96_000
    held_out: int = 200
    vocab_size: int = 640
    hidden_size: int = 128
    layers: int = 4
    learning_rate: float = 2e-3
    seed: int = 0


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


def train(folder: Path, recipe: Recipe) -> Path:
    """The trained model's folder below `folder`, made if it is not there: some thirty minutes of one core."""
    name = hashlib.sha256(json.dumps(asdict(recipe)).encode()).hexdigest()[:12]
    target = folder / f"model-{name}"
    if (target / "warmup.json").exists():
        return target
    data = {
        "train": training_rows("train", recipe.seed, recipe.rows),
        "test": training_rows("test", recipe.seed, recipe.held_out, cut=0.0, implicit=0.0),
    }
    files = {}
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in data.items():
        files[split] = folder / f"problems-{name}-{split}.jsonl"
        files[split].write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    warm_up(
        WarmupConfig(
            dataset=str(files["train"]),
            eval_dataset=str(files["test"]),
            output_dir=str(target),
            vocab_size=recipe.vocab_size,
            single_digits=False,
            hidden_size=recipe.hidden_size,
            num_hidden_layers=recipe.layers,
            num_attention_heads=max(2, recipe.hidden_size // 32),
            intermediate_size=3 * recipe.hidden_size,
            max_steps=recipe.steps,
            warmup_steps=min(100, recipe.steps),
            batch_size=recipe.batch_size,
            learning_rate=recipe.learning_rate,
            seed=recipe.seed,
        )
    )
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
