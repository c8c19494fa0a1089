"""Load problems to train and evaluate on from a file, the hub or the generator, and check them row by row."""

import itertools
import random
import string
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from .config import GENERATED, DataConfig, TrainConfig
from .embedded.problems import generate
from .rewards.calls import ARGUMENTS, CONTENTS
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
    if reserved := [column for column in (*ARGUMENTS, CONTENTS) if column in rows[0]]:
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
    question: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    instruction: str | None = "",
    at: datetime | None = None,
    examples: Sequence[tuple[str, str]] = (),
) -> list[int]:
    """Encode the prompt: by the chat template if the tokenizer has one (without thinking), else `Question: ...`.

    A template that writes the date writes that of `at`, by default today's. `examples` are questions with their
    answers, as earlier turns of the chat; a tokenizer without a template leaves them out.
    """
    asked = [f"{text}\n{instruction}" if instruction else text for text in (*(q for q, _ in examples), question)]
    turns = [text for turn in zip(asked, (answer for _, answer in examples), strict=False) for text in turn]
    messages = [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate([*turns, asked[-1]])]
    if _has_own_template(tokenizer):
        encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return encoded["input_ids"]
    # A template writes the special tokens itself.
    has_template = tokenizer.chat_template is not None
    return tokenizer(_rendered(messages, tokenizer, at), add_special_tokens=not has_template)["input_ids"]


def _has_own_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    return getattr(tokenizer, "backend", None) == "mistral_common"  # its `chat_template` is None


def _rendered(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, at: datetime | None = None) -> str:
    if tokenizer.chat_template is None:
        return f"Question: {messages[-1]['content']}\nAnswer:"
    dated: dict[str, Any] = {}
    if at is not None and "strftime_now" in str(tokenizer.chat_template):
        dated["chat_template"] = _clock(at) + str(tokenizer.get_chat_template())
    text: Any = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=False, **dated
    )
    return text


def require_whole_prompt(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raise `ValueError` naming the model if its template drops the question, or prompts end in the end of a text."""
    question, text = "What is 3 + 4?", ""
    try:
        ids = encode_prompt(question, tokenizer)
        if not _has_own_template(tokenizer):
            text = _rendered([{"role": "user", "content": question}], tokenizer)
    except Exception:  # a template that takes no such question is named with a row
        return
    if text and question not in text:
        raise ValueError(
            f"model {name}: its chat template drops the question {question!r}, it writes {text!r}; change it in "
            "chat_template.jinja so that it takes a message's content as text, not in parts"
        )
    if ids[-1] in (tokenizer.eos_token_id, tokenizer.pad_token_id):
        last = tokenizer.decode(ids[-1:])
        raise ValueError(
            f"model {name}: its prompts end in {last!r}, the token that ends or pads a text; set add_eos_token to "
            "false in tokenizer_config.json, or take it out of the chat template"
        )


def _clock(at: datetime) -> str:
    """Write a macro for a chat template that takes the place of transformers' `strftime_now`, which is today's."""
    # Functions among a template's variables reach it as text.
    codes = [f"%{flag}{code}" for code in string.ascii_letters for flag in ("", "-")]
    parts = "".join(f"|replace({code!r}, {at.strftime(code)!r})" for code in codes if at.strftime(code) != code)
    return "{% macro strftime_now(format) %}{{ format" + parts + " }}{% endmacro %}\n"


def encode_prompts(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    config: TrainConfig,
    context: int | None,
    at: datetime | None = None,
) -> list[list[int]]:
    """Encode the prompts of all rows; `ValueError` names the first that the template or the context does not take."""
    completion, prompts = config.max_completion_length, []
    for row in rows:
        try:
            prompts.append(encode_prompt(row["question"], tokenizer, instruction=config.instruction, at=at))
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
        try:
            return datasets.load_dataset(name, config or "main", split=split).to_list()
        except ValueError:  # it has no such configuration
            if config is not None:
                raise
        return datasets.load_dataset(name, None, split=split).to_list()  # its only one, or its own default
    except StopIteration:  # of a file without rows
        return []
    except Exception as problem:  # of every kind
        cause: BaseException = problem
        while cause.__cause__ is not None:
            cause = cause.__cause__
        said = " ".join(str(cause).split())
        advice = "; name it by dataset_config" * (not kind and config is None and "config" in said.lower())
        raise ValueError(f"dataset {name}: cannot be read: {type(cause).__name__}: {said}{advice}") from problem


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
