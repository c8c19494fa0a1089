"""Train a tokenizer and a small Qwen3-architecture model from scratch on solutions.

`python -m benchmarks evidence model` runs it. The folder it writes is a model for `python -m trainer --model`.
Its defaults made the checkpoint in `trainer/embedded/assets`, which solves 60 % of held-out problems; on another
machine they made one that solves 57 %. `--dataset` does the same on real problems.
"""

import itertools
import json
import math
import os
import platform
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from torch import Tensor
from tqdm import tqdm
from transformers import (
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    __version__,
    get_cosine_with_min_lr_schedule_with_warmup,
    set_seed,
)

from benchmarks.harness.workloads import digit_bpe
from cfa_kernels.options import Count, check_fields
from examples.problems import WordProblem, generate
from trainer.config import TrainConfig
from trainer.data import HELD_OUT_PROBLEMS, Row, encode_prompt, load_rows, train_and_eval_rows
from trainer.evaluate import evaluate
from trainer.policy import save_policy
from trainer.rollouts.in_process import TransformersEngine
from trainer.settings import DEFAULTS_FILE, GENERATED, DataConfig

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# Rows a tokenizer is trained on; more change little.
TOKENIZER_ROWS = 4000

# Settings for reinforcement learning of a model this small, written beside it: all weights train, the step is
# large, and prompts carry no instruction because none was seen in warm-up.
SUITED = {
    "use_peft": False,
    "instruction": "",
    "temperature": 1.0,
    "top_p": 1.0,
    "learning_rate": 2e-4,
    "max_steps": 40,
    "generation_batch_size": 128,
    "eval_steps": 10,
}


@dataclass
class WarmupConfig(DataConfig):
    """Settings of one warm-up run; the defaults made the embedded checkpoint."""

    output_dir: str = "runs/warmup"
    """Model folder to write; it must not exist or be empty."""
    model: str = ""
    """Folder of a model that learns on, with its own tokenizer and size; by default one from scratch."""
    vocab_size: Count = 512
    """Size of the byte-level BPE vocabulary."""
    hidden_size: int = 128
    """Width of the model."""
    num_hidden_layers: Count = 4
    """Layers of the model."""
    num_attention_heads: int = 4
    """Attention heads, of 32 dimensions each; half as many key-value heads."""
    intermediate_size: int = 384
    """Width of the MLP."""
    max_position_embeddings: int = 1024
    """Context of the model, tokens."""
    max_steps: Count = 1600
    """Optimizer steps."""
    batch_size: Count = 32
    """Sequences per step."""
    learning_rate: float = 2e-3
    """Peak learning rate of AdamW, reached after warmup_steps and decayed to a tenth along a cosine."""
    warmup_steps: int = 100
    """Steps over which the learning rate rises from 0."""
    seed: int = 0
    """Seed of problems, weights and order."""

    def __post_init__(self) -> None:
        """Reject values outside their range, naming the setting."""
        check_fields(self)
        if self.num_attention_heads < 2 or self.num_attention_heads % 2:
            raise ValueError(f"num_attention_heads must be even, got {self.num_attention_heads}")


def train_tokenizer(rows: Sequence[Row], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE as Qwen's: a token per digit, ChatML template, distinct pad and end-of-text tokens."""
    texts = (f"user\n{row['question']}\nassistant\n{row['answer']}" for row in rows)
    return PreTrainedTokenizerFast(
        tokenizer_object=digit_bpe(texts, vocab_size, [PAD, START, END]), eos_token=END, pad_token=PAD,
        padding_side="left", chat_template=CHAT_TEMPLATE, model_max_length=1_000_000,
    )  # fmt: skip


def small_model(config: WarmupConfig, tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    """Make a Qwen3 of the given size with random weights."""
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings")
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), num_key_value_heads=config.num_attention_heads // 2, head_dim=32,
        tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None, **{name: getattr(config, name) for name in sizes},
    ))  # fmt: skip


class Example(NamedTuple):
    """Token ids of a prompt and of its solution with the end-of-text token."""

    prompt: list[int]
    solution: list[int]


def encode(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, context: int) -> list[Example]:
    """Tokenise problems and solutions; one longer than the model's context is a `ValueError` that names its row."""
    examples = []
    for i, row in enumerate(rows):
        solution = tokenizer(row["answer"], add_special_tokens=False)["input_ids"]
        example = Example(encode_prompt(row["question"], tokenizer), [*solution, tokenizer.eos_token_id])
        length = len(example.prompt) + len(example.solution)
        if length > context:
            raise ValueError(f"row {i}: has {length} tokens, max_position_embeddings is {context}")
        examples.append(example)
    return examples


def batches(examples: Sequence[Example], batch_size: int, rng: random.Random) -> Iterator[list[Example]]:
    """Yield endless batches of like length: each pass is shuffled, then sorted within stretches of 16 batches."""
    while True:
        order = rng.sample(examples, len(examples))
        for i in range(0, len(order), 16 * batch_size):
            stretch = sorted(order[i : i + 16 * batch_size], key=lambda example: sum(map(len, example)))
            cut = [stretch[j : j + batch_size] for j in range(0, len(stretch), batch_size)]
            yield from rng.sample(cut, len(cut))


def solution_loss(model: Qwen3ForCausalLM, batch: Sequence[Example], pad_id: int) -> Tensor:
    """Compute the mean cross-entropy of the solutions' tokens (nats); prompts are read, not learnt."""
    width = max(len(prompt) + len(solution) for prompt, solution in batch)
    ids = torch.full((len(batch), width), pad_id)  # (B, L), padded on the right: causal attention needs no mask
    targets = torch.full((len(batch), width), -100)
    for row, (prompt, solution) in enumerate(batch):
        end = len(prompt) + len(solution)
        ids[row, :end] = torch.tensor(prompt + solution)
        targets[row, len(prompt) : end] = torch.tensor(solution)
    learnt = targets[:, 1:] != -100  # (B, L-1)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]  # (B, L-1, H)
    logits = model.lm_head(hidden[learnt])  # the head runs only on learnt rows
    return torch.nn.functional.cross_entropy(logits.float(), targets[:, 1:][learnt])


def training_rows(config: WarmupConfig) -> tuple[list[Row], list[Row]]:
    """Load solutions to learn from, and held-out problems; those of "generated" are learnt from a careless pupil."""
    if config.dataset != GENERATED:
        return train_and_eval_rows(config)
    rng = random.Random(config.seed)
    count = config.train_problems or config.max_steps * config.batch_size
    rows = []
    for problem in itertools.islice(generate("train", config.seed), count):
        rows.append(Row({"question": problem.question, "answer": careless(problem, rng).solution()}))
    return rows, load_rows(GENERATED, split="test", count=config.eval_problems or HELD_OUT_PROBLEMS)


def careless(problem: WordProblem, rng: random.Random) -> WordProblem:
    """Make the problem that a careless pupil solves: the last sum may take its number from an idle fact.

    A model that learns from one can do the arithmetic but is easily misled, a habit that reinforcement corrects in
    minutes.
    """
    *first, last = problem.steps
    facts = [fact for fact in problem.idle if last.op == "+" or (last.op == "-" and fact.number < last.left)]
    fact = max(facts, key=lambda fact: fact.misleading, default=None)
    if fact and rng.random() < fact.misleading:
        last = last._replace(right=fact.number)
    return replace(problem, steps=(*first, last))


def warm_up(config: WarmupConfig) -> Path:
    """Train tokenizer and model, report greedy accuracy, write the model folder and return it."""
    folder = Path(config.output_dir)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"output_dir: {folder} is not empty; name another folder or remove it")
    rows, held_out = training_rows(config)
    set_seed(config.seed)
    if config.model:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(config.model)
        model = Qwen3ForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    else:
        tokenizer = train_tokenizer(rows[:TOKENIZER_ROWS], config.vocab_size)
        model = small_model(config, tokenizer)
    examples = encode(rows, tokenizer, model.config.max_position_embeddings)
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    scheduler = get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, config.warmup_steps, config.max_steps, min_lr_rate=0.1
    )
    losses = list[float]()
    feed = itertools.islice(batches(examples, config.batch_size, random.Random(config.seed)), config.max_steps)
    for step, batch in enumerate(tqdm(feed, "warm-up", config.max_steps), 1):
        loss = solution_loss(model, batch, tokenizer.pad_token_id)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise FloatingPointError(f"step {step}: loss is {losses[-1]}; nothing was saved")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    longest = sorted(len(example.solution) for example in examples)[int(0.995 * len(examples))]
    length_limit = 16 * math.ceil(longest * 1.1 / 16)
    asked = [encode_prompt(row["question"], tokenizer) for row in held_out]
    limits = TrainConfig(generation_batch_size=128, max_completion_length=length_limit)
    result = evaluate(TransformersEngine(model.eval(), tokenizer), held_out, asked, limits)
    save_policy(model, tokenizer, folder)
    suited = yaml.safe_dump(SUITED | {"max_completion_length": length_limit}, sort_keys=False)
    (folder / DEFAULTS_FILE).write_text(suited, encoding="utf-8")
    record = {
        "config": {
            name: Path(value).name if isinstance(value, str) and os.path.isabs(value) else value
            for name, value in (asdict(config) | {"output_dir": None}).items()
        },
        "loss": sum(losses[-100:]) / len(losses[-100:]),
        "held_out_accuracy": result.accuracy,
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": __version__},
    }
    (folder / "warmup.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(
        f"Held-out accuracy {result.accuracy:.1%} ({len(held_out)} problems, greedy). "
        f"Train on with: python -m trainer --model {folder}"
    )
    return folder
