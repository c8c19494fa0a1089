"""Warm-up: real GSM8K solutions learnt from scratch, and the same weights for the same seed."""

import itertools
import json
import math
import random
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.research.warmup import WarmupConfig, careless, warm_up
from examples.problems import generate

pytestmark = pytest.mark.slow

HELD_OUT = 4


def test_a_careless_solution_takes_its_last_number_from_an_idle_fact_now_and_then() -> None:
    rng, slips = random.Random(0), 0
    for problem in itertools.islice(generate("train", 0), 2000):
        solution = careless(problem, rng).solution()
        if solution != problem.solution():
            slips += 1
            assert int(re.findall(r"[-+](\d+)=", solution)[-1]) in {fact.number for fact in problem.idle}
    assert 500 < slips < 900


@pytest.fixture(scope="module")
def problems(gsm8k, tmp_path_factory) -> Path:
    """Twenty real problems, the shortest, so that a test can afford to learn them."""
    lines = (gsm8k / "train.jsonl").read_text("utf-8").splitlines()
    file = tmp_path_factory.mktemp("gsm8k") / "short.jsonl"
    file.write_text("".join(line + "\n" for line in sorted(lines, key=len)[:20]), "utf-8")
    return file


@pytest.fixture(scope="module")
def model(problems, tmp_path_factory) -> Path:
    """The folder of a model warmed up on their solutions."""
    folder = tmp_path_factory.mktemp("model") / "warm"
    return warm_up(WarmupConfig(
        dataset=str(problems), output_dir=str(folder), eval_problems=HELD_OUT, hidden_size=96, num_hidden_layers=1,
        intermediate_size=192, max_steps=80, warmup_steps=20, batch_size=8, learning_rate=6e-3,
    ))  # fmt: skip


def test_warm_up_learns_and_leaves_a_model_that_loads(model) -> None:
    record = json.loads((model / "warmup.json").read_text())
    assert math.isfinite(record["loss"])
    assert record["loss"] < 3
    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert all(p.isfinite().all() for p in loaded.parameters())
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "Natalia sold 48/2 = <<48/2=24>>24 clips.\n#### 24"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_warm_up_is_the_same_for_the_same_seed(tmp_path) -> None:
    def weights(name: str, seed: int) -> bytes:
        folder = warm_up(WarmupConfig(
            output_dir=str(tmp_path / name), seed=seed, train_problems=64, eval_problems=4, hidden_size=32,
            num_attention_heads=2, num_hidden_layers=1, max_steps=3, batch_size=8,
        ))  # fmt: skip
        return (folder / "model.safetensors").read_bytes()

    first = weights("first", 0)
    assert weights("again", 0) == first
    assert weights("other", 1) != first
