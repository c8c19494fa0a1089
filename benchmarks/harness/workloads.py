"""Make workloads: real GSM8K completions where they are installed, else generated ones, and models to score with.

No network: the tokenizer is a byte-level BPE trained here, and models have random weights in the shapes of real ones.
"""

import copy
import functools
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from benchmarks.harness.environment import SEED, gsm8k_folder
from cfa_kernels import AnswerRules, Span, SpanRules, detect_spans, find_answer
from trainer.rewards.calls import group_advantages

# The one of the first dozen or so with a half-mixed draw of four problems whose padding, shared tokens and branch
# tokens are nearest to the medians over 300 draws, with groups as they come and with all groups mixed.
STEP_SEED = 12
VOCABULARY = 16_384
MARKER = "####"


@dataclass(frozen=True)
class Job:
    """The input of one scoring call, and where it comes from.

    Every completion ends with its answer, right after a marker token: then "the answer" means the same tokens to
    every contender, those included that score from the marker to the end of the row.
    """

    name: str
    source: str
    prompts: list[Tensor]
    completions: list[Tensor]
    spans: list[list[Span]]
    answers: list[Span]
    placeholder_id: int
    tokenizer: PreTrainedTokenizerFast

    def to(self, device: torch.device) -> "Job":
        """The same job with its ids on `device`."""
        prompts, completions = ([ids.to(device) for ids in rows] for rows in (self.prompts, self.completions))
        return replace(self, prompts=prompts, completions=completions)

    def part(self, rows: Sequence[int]) -> "Job":
        """The job of some of its completions."""
        return replace(self, **{name: [getattr(self, name)[b] for b in rows] for name in _COLUMNS})

    def describe(self) -> dict[str, Any]:
        """Sizes, for the record."""
        rows = len(self.completions)
        return {
            "source": self.source,
            "completions": rows,
            "distinct_prompts": len({tuple(p.tolist()) for p in self.prompts}),
            "prompt_tokens_mean": sum(map(len, self.prompts)) / rows,
            "completion_tokens_mean": sum(map(len, self.completions)) / rows,
            "completion_tokens_max": max(map(len, self.completions)),
            "spans_mean": sum(map(len, self.spans)) / rows,
            "span_tokens_mean": sum(s.end - s.start for row in self.spans for s in row) / sum(map(len, self.spans)),
            "answer_tokens_mean": sum(a.end - a.start for a in self.answers) / rows,
        }


_COLUMNS = ("prompts", "completions", "spans", "answers")


def variants(job: Job, b: int) -> Iterator[Tensor]:
    """Completion `b` as sampled, then with each of its spans replaced by placeholders, (T_b,) each."""
    completion = job.completions[b]
    yield completion
    for span in job.spans[b]:
        masked = completion.clone()
        masked[span.start : span.end] = job.placeholder_id
        yield masked


# Text


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@dataclass(frozen=True)
class Corpus:
    """Texts to train the tokenizer on, and problems with the completions of each."""

    source: str
    training_texts: list[str]
    problems: list[tuple[str, list[str]]]
    correct: dict[str, list[bool]]
    """By prompt, whether each of its completions gives the right answer."""


def _prompt(question: str) -> str:
    return f"Solve the problem step by step. End with {MARKER} and the final number.\n\nQuestion: {question}\nAnswer: "


@functools.cache
def corpus() -> Corpus:
    """GSM8K's problems with real model solutions if they are here, else generated text of that kind."""
    folder = gsm8k_folder()
    if folder is None:
        return _generated_corpus()
    training = _read_jsonl(folder / "train.jsonl")
    texts = [text for row in training for text in (row["question"], row["answer"])]
    problems, correct = [], {}
    for row in _read_jsonl(folder / "model_solutions.jsonl"):
        solutions = [cell["solution"] for cell in row.values() if isinstance(cell, dict)]
        correct[_prompt(row["question"])] = [cell["is_correct"] for cell in row.values() if isinstance(cell, dict)]
        # The models wrote "A: 18" on the last line; "#### 18" is what GSM8K itself and its trainers use.
        problems.append((_prompt(row["question"]), [re.sub(r"\nA: ", f"\n{MARKER} ", text) for text in solutions]))
    return Corpus("real: GSM8K model solutions", texts, problems, correct)


def _generated_corpus() -> Corpus:
    """Word problems by template, with lengths and spans about GSM8K's own."""
    rng = random.Random(SEED)
    names, things = ("Tom", "Ana", "Wei", "Sara", "Ravi"), ("apples", "books", "pens", "coins", "cards")

    def question() -> str:
        sentences = [
            f"{rng.choice(names)} buys {rng.randint(2, 60)} {rng.choice(things)} at ${rng.randint(2, 9)} each."
            for _ in range(rng.randint(3, 6))
        ]
        return _prompt(" ".join(sentences) + " How much do they spend in all?")

    def solution() -> str:
        lines = []
        for _ in range(rng.randint(3, 6)):
            a, b = rng.randint(2, 60), rng.randint(2, 9)
            lines.append(f"{rng.choice(names)} spends {a} * {b} = ${a * b} on {rng.choice(things)} in every week.")
        return "\n".join(lines) + f"\n{MARKER} {rng.randint(10, 999)}"

    problems = [(question(), [solution() for _ in range(4)]) for _ in range(200)]
    # As often right as wrong, so that about as many groups are mixed as in real data.
    correct = {
        prompt: [rng.random() < 0.5 for _ in row] if rng.random() < 0.6 else [True] * 4 for prompt, row in problems
    }
    texts = [text for prompt, row in problems for text in (prompt, *row)]
    return Corpus("generated: no real data here", texts, problems, correct)


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with single digits, as Qwen's, trained on the corpus; its pad token is the placeholder."""
    bpe = Tokenizer(models.BPE())
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.Sequence(parts), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(corpus().training_texts, trainer)
    bpe.add_tokens([MARKER])  # one token in real vocabularies, too
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>")


@functools.cache
def _marker_id() -> int:
    return tokenizer().get_vocab()[MARKER]


# Jobs


@dataclass(frozen=True)
class _Scored:
    completion: Tensor
    spans: list[Span]
    answer: Span


def _scorable(text: str, max_spans: int) -> _Scored | None:
    """A solution as ids, answer and spans; None where it lacks either or goes on after its answer.

    The answer starts right after the marker, with the space in front of the number if that is a token.
    """
    ids = torch.tensor(tokenizer().encode(text), dtype=torch.long)
    answer = find_answer(ids, tokenizer())
    markers = ids.eq(_marker_id()).nonzero()
    if answer is None or answer.end != len(ids) or not 0 < len(markers) <= 1:
        return None
    after_marker = int(markers[0]) + 1
    if str(tokenizer().decode(ids[after_marker : answer.start])).strip():
        return None
    rules = SpanRules(max_spans=max_spans, selection="first")  # so that jobs are those of earlier results
    spans = detect_spans(ids, tokenizer(), answer=answer, spans=rules, answers=AnswerRules(lead_in="statement"))
    return _Scored(ids, spans, Span(after_marker, answer.end)) if spans else None


def gsm8k_job(problems: int) -> Job:
    """`problems` problems drawn at random, four completions each, every one with an answer and a span."""
    return _job_of_problems(f"gsm8k-{4 * problems}", _drawn_problems(problems, SEED, lambda question: True))


def _drawn_problems(problems: int, seed: int, wanted: Callable[[str], bool]) -> list[tuple[str, list[_Scored]]]:
    """The first `problems` wanted ones of a random order, with their first four completions, all scorable."""
    order = list(corpus().problems)
    random.Random(seed).shuffle(order)
    drawn = []
    for question, solutions in order:
        if not wanted(question):
            continue
        scored = [row for text in solutions[:4] if (row := _scorable(text, 10)) is not None]
        if len(scored) == 4:
            drawn.append((question, scored))
        if len(drawn) == problems:
            return drawn
    raise ValueError(f"problems must be at most {len(drawn)}, how many have four scorable solutions; got {problems}")


def _job_of_problems(name: str, drawn: Sequence[tuple[str, list[_Scored]]]) -> Job:
    prompts = [torch.tensor(tokenizer().encode(question), dtype=torch.long) for question, rows in drawn for _ in rows]
    return _job(name, corpus().source, prompts, [row for _, rows in drawn for row in rows])


def _job(name: str, source: str, prompts: list[Tensor], rows: Sequence[_Scored]) -> Job:
    completions, spans, answers = ([getattr(row, name) for row in rows] for name in ("completion", "spans", "answer"))
    return Job(name, source, prompts, completions, spans, answers, tokenizer().pad_token_id, tokenizer())


def shaped_job(*, group: int, prompt: int, completion: int, spans: int, span_tokens: int = 12, seed: int = SEED) -> Job:
    """Random ids in a given shape: one prompt, `group` completions, spans at even distances, a 3-token answer."""
    answer = Span(completion - 3, completion)
    room = answer.start - 1  # the marker stays
    if spans * span_tokens > room:
        raise ValueError(f"spans={spans} of {span_tokens} tokens do not fit in {room} tokens of reasoning")
    generator = torch.Generator().manual_seed(seed)
    low, high = 2, _marker_id()  # leaves out the special tokens and the marker, the first two ids and the last
    prompt_ids = torch.randint(low, high, (prompt,), generator=generator)
    completions = torch.randint(low, high, (group, completion), generator=generator)
    completions[:, answer.start - 1] = _marker_id()
    starts = [k * room // spans for k in range(spans)]
    row_spans = [Span(start, start + span_tokens) for start in starts]
    rows = [_Scored(ids, row_spans, answer) for ids in completions]
    name = f"shaped-g{group}-p{prompt}-c{completion}-k{spans}"
    return _job(name, "generated: random ids", [prompt_ids] * group, rows)


# Rollouts


@dataclass(frozen=True)
class JobRollouts:
    """Completions of a job in groups of one prompt each, side by side, with what they earned."""

    job: Job
    group: int  # completions per prompt
    rewards: Tensor  # (B,) fp32, on the host
    advantages: Tensor  # (B,) fp32, on the host; 0 throughout a group whose rewards are equal

    @property
    def tokens(self) -> int:
        """Completion tokens of the whole batch: what its loss is divided by."""
        return sum(map(len, self.job.completions))

    @property
    def active(self) -> list[int]:
        """Completions with an advantage."""
        return self.advantages.nonzero().flatten().tolist()

    def to(self, device: torch.device) -> "JobRollouts":
        """The same with the job's ids on `device`."""
        return replace(self, job=self.job.to(device))

    def describe(self) -> dict[str, Any]:
        """Sizes, for the record."""
        groups = self.advantages.view(-1, self.group)
        return {
            **self.job.describe(),
            "group": self.group,
            "mixed_groups": int((groups != 0).any(1).sum()),
            "groups": len(groups),
            "mean_reward": self.rewards.mean().item(),
        }


def gsm8k_rollouts(problems: int, *, mixed: bool, seed: int = STEP_SEED) -> JobRollouts:
    """`problems` problems drawn at random with four completions each and their own rewards, 1 for a right answer.

    With `mixed` only problems whose completions differ in reward; else as they come.
    """
    correct = corpus().correct

    def wanted(question: str) -> bool:
        return not mixed or len(set(correct[question][:4])) > 1

    drawn = _drawn_problems(problems, seed, wanted)
    job = _job_of_problems(f"gsm8k-{'mixed' if mixed else 'as-they-come'}-{4 * len(drawn)}", drawn)
    return _rollouts(job, 4, [float(right) for question, _ in drawn for right in correct[question][:4]])


def shaped_rollouts(problems: int, *, group: int, **shape: int) -> JobRollouts:
    """Random words in the shape that `shaped_job` takes; every other completion of a group is right."""
    jobs = [shaped_job(group=group, **shape, seed=SEED + i) for i in range(problems)]
    columns = {name: [row for job in jobs for row in getattr(job, name)] for name in _COLUMNS}
    # Halves of characters would shift the places of peers that find the answer by counting characters.
    words = word_ids()
    for name in ("prompts", "completions"):
        columns[name] = [torch.where(ids == _marker_id(), ids, words[ids % len(words)]) for ids in columns[name]]
    job = replace(jobs[0], name=f"{problems}x{jobs[0].name}", **columns)
    return _rollouts(job, group, [float(b % 2) for b in range(problems * group)])


@functools.cache
def word_ids() -> Tensor:
    """List the ids of tokens that are letters only."""
    texts = (str(tokenizer().decode([i])).strip() for i in range(len(tokenizer())))
    return torch.tensor([i for i, text in enumerate(texts) if text.isascii() and text.isalpha()])


def _rollouts(job: Job, group: int, rewards: list[float]) -> JobRollouts:
    earned = torch.tensor(rewards)
    return JobRollouts(job, group, earned, group_advantages(earned, group))


# Models


def _qwen3(hidden: int, inner: int, layers: int, heads: tuple[int, int], dim: int, **options: Any) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads[0],
        num_key_value_heads=heads[1], head_dim=dim, **options,
    )  # fmt: skip


MODELS: dict[str, PretrainedConfig] = {
    "qwen3-tiny": _qwen3(64, 128, 2, (4, 2), 16, vocab_size=VOCABULARY, initializer_range=0.1),
    # 42 M parameters, 40 % of them in the tied head: real models of this size spend that share or more on theirs.
    "qwen3-40m": _qwen3(
        512, 1536, 8, (8, 4), 64, vocab_size=32_768, tie_word_embeddings=True, initializer_range=0.06
    ),
    "Qwen3-1.7B": _qwen3(
        2048, 6144, 28, (16, 8), 128, vocab_size=151_936, max_position_embeddings=40_960, tie_word_embeddings=True
    ),
    "Qwen2.5-3B": Qwen2Config(
        hidden_size=2048, intermediate_size=11_008, num_hidden_layers=36, num_attention_heads=16,
        num_key_value_heads=2, vocab_size=151_936, max_position_embeddings=32_768, tie_word_embeddings=True,
    ),
    "Llama-3.2-3B": LlamaConfig(
        hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24, num_key_value_heads=8,
        head_dim=128, vocab_size=128_256, max_position_embeddings=131_072, tie_word_embeddings=True,
    ),
}  # fmt: skip
"""Shapes by name."""

HEADS = {
    names: (MODELS[name].hidden_size, MODELS[name].vocab_size)
    for names, name in {"Qwen3-1.7B and Qwen2.5-3B": "Qwen3-1.7B", "Llama-3.2-3B": "Llama-3.2-3B"}.items()
}
"""Hidden size and vocabulary of the heads of the large models."""


def head_dim(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def random_model(name: str, *, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model in the shape of `name` with seeded random weights, in `eval` mode."""
    torch.manual_seed(SEED)
    with device:
        # A configuration of its own: trainers write into it, and the next model would come out another.
        model = AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name]), dtype=dtype)
    return model.eval()


def policy(name: str, *, lora: bool, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A model to train, in training mode: adapters of rank 32 on every linear layer but the head, or all of it.

    Adapters are far from zero, as in the middle of a run: at the start half of their gradients would be zero.
    """
    model = random_model(name, device=device, dtype=dtype)
    if not lora:
        return model.train()
    from peft import LoraConfig, get_peft_model  # for seconds: most commands need none

    adapted = get_peft_model(model, LoraConfig(r=32, lora_alpha=32, target_modules="all-linear"))
    generator = torch.Generator(device).manual_seed(SEED)
    for parameter_name, parameter in adapted.named_parameters():
        if "lora_B" in parameter_name:
            nn.init.normal_(parameter, std=0.02, generator=generator)
    return adapted.train()
