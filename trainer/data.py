"""Load problems to train and evaluate on from a file, the hub or the generator, and check them row by row."""

import itertools
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from .config import GENERATED, DataConfig, TrainConfig
from .embedded.problems import generate
from .rewards.calls import ARGUMENTS
from .rewards.code import mbpp_row
from .rewards.numbers import gold_number

GENERATED_TRAIN_PROBLEMS = 8192
HELD_OUT_PROBLEMS = 256
# Reinforcement learning's own stream of generated problems, whatever the seed of the run, so that runs compare.
GENERATED_SEED = 1
_FILES = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


class Row(dict[str, Any]):
    """Columns of a problem: `question`, and `answer` or `tests`; others go to rewards. `where` names it in errors."""

    def __init__(self, columns: Mapping[str, Any], where: str = "a row") -> None:
        super().__init__(columns)
        self.where = where


def load_rows(
    name: str, *, split: str, count: int | None = None, columns: DataConfig | None = None, seed: int = GENERATED_SEED
) -> list[Row]:
    """Load the first `count` rows of a data set, checked; `ValueError` names data set, row (from 0) and reason."""
    if name == GENERATED:
        problems = enumerate(itertools.islice(generate(split, seed), count or GENERATED_TRAIN_PROBLEMS))
        return [Row({"question": p.question, "answer": p.solution()}, f"dataset {name}, row {i}") for i, p in problems]
    columns = columns or DataConfig()
    rows = _load(name, split, columns.dataset_config if name == columns.dataset else None)[:count]
    if not rows:
        raise ValueError(f"dataset {name}: has no rows")
    if reserved := [column for column in ARGUMENTS if column in rows[0]]:
        raise ValueError(f"dataset {name}: has a column {reserved[0]!r}, which reward functions get anyway; rename it")
    return [_checked(row, f"dataset {name}, row {i}", columns) for i, row in enumerate(rows)]


def train_and_eval_rows(config: DataConfig, *, seed: int = GENERATED_SEED) -> tuple[list[Row], list[Row]]:
    """Load training and held-out problems, disjoint by question; `seed` draws generated training problems only."""
    train = load_rows(config.dataset, split="train", count=config.train_problems, columns=config, seed=seed)
    held_out = config.eval_problems
    if config.eval_dataset is None and Path(config.dataset).suffix in _FILES:
        random.Random(0).shuffle(train)
        held_out = held_out or HELD_OUT_PROBLEMS
        if held_out >= len(train):
            raise ValueError(f"eval_problems: cannot set {held_out} of {len(train)} rows of {config.dataset} aside")
        test, train = train[:held_out], train[held_out:]
    else:
        name = config.eval_dataset or config.dataset
        held_out = held_out or (HELD_OUT_PROBLEMS if name == GENERATED else None)
        test = load_rows(name, split="test", count=held_out, columns=config)
    questions = {row["question"] for row in test}
    train = [row for row in train if row["question"] not in questions]
    if not train:
        raise ValueError(f"dataset {config.dataset}: every training problem is also held out")
    return train, test


def encode_prompt(
    question: str, tokenizer: PreTrainedTokenizerBase, *, instruction: str | None = "",
    examples: Sequence[tuple[str, str]] = (),
) -> list[int]:  # fmt: skip
    """Encode the prompt: by the chat template if the tokenizer has one (without thinking), else `Question: ...`.

    `examples` are questions with their answers, as earlier turns of the chat.
    """
    asked = [f"{text}\n{instruction}" if instruction else text for text in (*(q for q, _ in examples), question)]
    if tokenizer.chat_template is None:
        return tokenizer(f"Question: {asked[-1]}\nAnswer:")["input_ids"]
    texts = [text for turn in zip(asked, (answer for _, answer in examples), strict=False) for text in turn]
    text = tokenizer.apply_chat_template(
        [{"role": ("user", "assistant")[i % 2], "content": one} for i, one in enumerate([*texts, asked[-1]])],
        tokenize=False, add_generation_prompt=True, enable_thinking=False,
    )  # fmt: skip
    # The template writes the special tokens itself.
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def encode_prompts(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, config: TrainConfig, context: int | None
) -> list[list[int]]:
    """Encode the prompts of all rows; `ValueError` names the first that the template or the context does not take."""
    completion, prompts = config.max_completion_length, []
    for row in rows:
        try:
            prompts.append(encode_prompt(row["question"], tokenizer, instruction=config.instruction))
        except Exception as problem:  # a chat template raises what it likes
            said = f"{type(problem).__name__}: {problem}"
            raise ValueError(f"{row.where}: the chat template of model {config.model} fails: {said}") from problem
        if context is not None and len(prompts[-1]) + completion > context:
            room = f"context {context} of model {config.model} less max_completion_length {completion}"
            fitting = f"the prompt has {len(prompts[-1])} tokens, at most {max(context - completion, 0)} fit ({room})"
            raise ValueError(f"{row.where}: {fitting}; shorten or remove it, or lower max_completion_length")
    return prompts


def _load(name: str, split: str, config: str | None) -> list[Any]:
    import datasets  # slow to import

    kind = _FILES.get(Path(name).suffix)
    if Path(name).exists() != bool(kind) or Path(name).is_dir():
        files = "a .json, .jsonl or .parquet file that exists"
        raise ValueError(f"dataset {name}: expected {files}, a hub name or {GENERATED!r}")
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        if kind:
            with tempfile.TemporaryDirectory() as cache:
                return datasets.load_dataset(kind, data_files=name, split="train", cache_dir=cache).to_list()
        configs = [config] if config is not None else datasets.get_dataset_config_names(name)
        return datasets.load_dataset(name, configs[0] if len(configs) == 1 else "main", split=split).to_list()
    except StopIteration:  # of a file without rows
        return []
    except Exception as problem:  # of every kind
        cause: BaseException = problem
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ValueError(f"dataset {name}: cannot be read: {type(cause).__name__}: {cause}") from problem


def _checked(row: dict[str, Any], where: str, columns: DataConfig) -> Row:
    if columns.kind == "mbpp":
        return Row(mbpp_row(row, where), where)
    row, texts = row.copy(), {}
    for role, column in (("question", columns.question_column), ("answer", columns.answer_column)):
        if column not in row:
            raise ValueError(f"{where}: has no column {column!r}, only {sorted(row)}; name the one by {role}_column")
        value = row.pop(column)
        texts[role] = str(value) if role == "answer" and isinstance(value, int | float) else value
        if not isinstance(texts[role], str) or not texts[role].strip():
            raise ValueError(f"{where}: column {column!r} must be text that is not empty, got {value!r}")
    if columns.kind == "numbers" and gold_number(texts["answer"]) is None:
        raise ValueError(f"{where}: no number can be read from {columns.answer_column!r}: {texts['answer'][-60:]!r}")
    return Row(row | texts, where)
