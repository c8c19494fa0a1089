"""Load problems to train and evaluate on from a file, the hub or the demo, and check them row by row."""

import gzip
import json
import random
import re
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from cfa_kernels.text.patterns import ANNOTATION

from .rewards.built_in import ARGUMENTS, INSTRUCTIONS, OPTIONAL
from .rewards.numbers import gold_number
from .settings import ASSETS, EXAMPLE_POOL, FILES, GENERATED, TrainSettings

HELD_OUT_PROBLEMS = 256
_HEADER = "Question:"

Messages = list[dict[str, str]]
"""A prompt as chat templates take it: messages with a `role` and a `content`."""


class NoSplitError(ValueError):
    """A data set of the hub has no split of that name."""


class Row(dict[str, Any]):
    """Columns of a problem, named `where` in errors; the question of one with `messages` is its last one's content."""

    def __init__(self, columns: Mapping[str, Any], where: str = "a row", messages: Messages | None = None) -> None:
        super().__init__(columns)
        self.where, self.messages = where, messages

    @property
    def prompt(self) -> str | Messages:
        """The messages, or the question."""
        return self["question"] if self.messages is None else self.messages


def load_rows(name: str, *, split: str, count: int | None = None, columns: TrainSettings | None = None) -> list[Row]:
    """Load the first `count` rows of a data set, checked; `ValueError` names data set, row (from 0) and reason."""
    if name == GENERATED:
        # Written by examples/problems.py from seed 1, whatever the seed of the run, so that runs compare.
        with gzip.open(ASSETS / f"{split}.jsonl.gz", "rt", encoding="utf-8") as lines:
            rows = [Row(json.loads(line), f"dataset {name}, row {i}") for i, line in enumerate(lines)]
        if len(rows) < (count or 0):
            raise ValueError(f"dataset {name}: has {len(rows)} problems to {split} on, and {count} are asked for")
        return rows[:count]
    columns = columns or TrainSettings()
    rows = _load(name, split, columns.dataset_config if name == columns.dataset else None)[:count]
    if not rows:
        raise ValueError(f"dataset {name}: has no rows")
    if reserved := [column for column in (*ARGUMENTS, *OPTIONAL) if column in rows[0]]:
        raise ValueError(f"dataset {name}: has a column {reserved[0]!r}, which reward functions get anyway; rename it")
    return [_checked(row, f"dataset {name}, row {i}", columns) for i, row in enumerate(rows)]


def train_and_eval_rows(config: TrainSettings) -> tuple[list[Row], list[Row]]:
    """Load training and held-out problems, disjoint by question."""
    held_out, wanted, test = config.eval_problems, config.train_problems, list[Row]()
    name = config.eval_dataset or config.dataset
    if config.eval_dataset is not None or Path(name).suffix not in FILES:
        count = held_out or (HELD_OUT_PROBLEMS if name == GENERATED else None)
        try:
            test = load_rows(name, split="test", count=count, columns=config)
        except NoSplitError:
            if config.eval_dataset is not None:
                raise
    train = load_rows(config.dataset, split="train", count=wanted if test else None, columns=config)
    if not test:
        random.Random(0).shuffle(train)  # whatever the run's seed: runs that compare are tested on the same rows
        held_out = held_out or HELD_OUT_PROBLEMS
        if held_out >= len(train):
            raise ValueError(f"eval_problems: cannot set {held_out} of {len(train)} rows of {config.dataset} aside")
        test, train = train[:held_out], train[held_out:]
    # Data sets repeat questions, within a file and across splits; a repeated one would be trained and tested on.
    prompts = {str(row.prompt) for row in test}
    train = [row for row in train if str(row.prompt) not in prompts][:wanted]
    if not train:
        raise ValueError(f"dataset {config.dataset}: every training problem is also held out")
    return train, test


def take_examples(rows: Sequence[Row], count: int) -> tuple[list[Row], list[Row]]:
    """Take `count` rows as worked examples, the shortest of the first 256; gives them and the rows without them."""
    examples = sorted(rows[:EXAMPLE_POOL], key=lambda row: len(row["question"]) + len(row["answer"]))[:count]
    questions = {row["question"] for row in examples}
    others = [row for row in rows if row["question"] not in questions]
    if not others:
        raise ValueError(f"examples: {count} of {len(rows)} training problems leave none to train on; take fewer")
    return examples, others


def encode_prompt(
    question: str | Messages, tokenizer: PreTrainedTokenizerBase, *, instruction: str | None = "",
    system: str | None = None, thinking: bool = False, examples: Sequence[Row] = (),
) -> list[int]:  # fmt: skip
    """Encode the prompt: by the chat template if the tokenizer has one, else `Question: ...`.

    `instruction` goes behind the last message, `system` in the place of the first. Examples come before as turns of
    their own: a question with the instruction, and its solution without annotations of arithmetic.
    """
    end = f"\n{instruction}" if instruction else ""
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else [*question]
    messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}{end}"}
    for row in reversed(examples):
        solution = re.sub(ANNOTATION, "", row["answer"])
        messages[:0] = [{"role": "user", "content": row["question"] + end}, {"role": "assistant", "content": solution}]
    if system is not None:
        messages = [{"role": "system", "content": system}, *(one for one in messages if one["role"] != "system")]
    if _takes_messages(tokenizer):
        options: dict[str, Any] = {} if tokenizer.chat_template is None else {"enable_thinking": thinking}
        encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, **options)
        return encoded["input_ids"]
    if len(messages) > 1:
        raise ValueError("a tokenizer without a chat template takes one message, no system prompt and no examples")
    return tokenizer(f"{_HEADER} {messages[0]['content']}\nAnswer:")["input_ids"]


def _takes_messages(tokenizer: PreTrainedTokenizerBase) -> bool:
    return tokenizer.chat_template is not None or getattr(tokenizer, "backend", None) == "mistral_common"  # has its own


def stop_strings(tokenizer: PreTrainedTokenizerBase, config: TrainSettings) -> list[str]:
    """List the texts that end a completion: those of the run, by default the header of the program's own prompts."""
    return config.stop if config.stop is not None else [f"\n{_HEADER}"] * (not _takes_messages(tokenizer))


def require_whole_prompt(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raise `ValueError` naming the model if its template drops the question, or prompts end in the end of a text."""
    question = "What is 3 + 4?"
    try:
        ids, text = encode_prompt(question, tokenizer), question
        if tokenizer.chat_template is not None:
            text = str(tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False))
    except Exception:  # a template that takes no such question is named with a row
        return
    if question not in text:
        raise ValueError(f"model {name}: its chat template drops the question, it writes {text!r}; let it take text")
    if ids[-1] in (tokenizer.eos_token_id, tokenizer.pad_token_id):
        raise ValueError(f"model {name}: its prompts end in the token that ends or pads a text; change its template")


def stop_clock(at: datetime) -> None:
    """Let chat templates that write the date write that of `at`: a run resumed tomorrow has the same prompts."""
    # A function among a template's variables would reach it as text.
    vars(chat_template_utils)["datetime"] = type("Clock", (), {"now": staticmethod(lambda: at)})


def encode_prompts(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, config: TrainSettings, context: int | None = None,
    examples: Sequence[Row] = (),
) -> list[list[int]]:  # fmt: skip
    """Encode the prompts of rows by a run's settings; `ValueError` names what template or context do not take."""
    room, prompts = None if context is None else context - config.max_completion_length, []
    if config.enable_thinking and "enable_thinking" not in str(tokenizer.chat_template):
        raise ValueError(f"enable_thinking: the chat template of model {config.model} does not read it; omit it")
    options: dict[str, Any] = {"system": config.system_prompt, "thinking": config.enable_thinking, "examples": examples}
    for row in rows:
        if examples and row.messages is not None:
            raise ValueError(f"{row.where}: examples go before a question that is text, not messages; omit examples")
        own = INSTRUCTIONS[config.kind] if row.messages is None else None
        instruction = own if config.instruction is None else config.instruction
        try:
            prompts.append(encode_prompt(row.prompt, tokenizer, instruction=instruction, **options))
        except Exception as problem:  # a chat template raises what it likes
            said = f"the tokenizer of {config.model} cannot write the prompt: {problem!r}"
            raise ValueError(f"{row.where}: {said}") from problem
        if room is not None and (size := len(prompts[-1])) > room:
            said = f"the prompt has {size} tokens, and {max(room, 0)} fit beside max_completion_length"
            raise ValueError(f"{row.where}: {said} in the context {context} of the model")
    return prompts


def _load(name: str, split: str, config: str | None) -> list[Any]:
    import datasets  # slow to import

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        if kind := FILES.get(Path(name).suffix):
            with tempfile.TemporaryDirectory() as cache:  # the usual one would serve a file's old rows once it changes
                return datasets.load_dataset(kind, data_files=name, split="train", cache_dir=cache).to_list()
        try:
            splits = datasets.load_dataset(name, config or "main")
        except ValueError:  # it has no such configuration
            if config is not None:
                raise
            splits = datasets.load_dataset(name)  # its only one, or its own default
    except Exception as problem:  # of every kind
        raise ValueError(f"dataset {name}: cannot be read: {problem.__cause__ or problem!r}") from problem
    if split not in splits:
        raise NoSplitError(f"dataset {name}: has no split {split!r}, only {sorted(splits)}")
    return splits[split].to_list()


def _checked(row: dict[str, Any], where: str, columns: TrainSettings) -> Row:
    row = row.copy()
    question, answer = (_taken(row, name, where) for name in (columns.question_column, columns.answer_column))
    messages = question if isinstance(question, list) else None
    if messages is not None:
        last = messages[-1] if messages and isinstance(messages[-1], dict) else {}
        if last.get("role") != "user":
            raise ValueError(f"{where}: the last message of {columns.question_column!r} must be the user's: {messages}")
        question = last.get("content")
    texts = {"question": question, "answer": str(answer) if isinstance(answer, int | float) else answer}
    for role, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{where}: the {role} must be text that is not empty, got {text!r}")
    if columns.kind == "numbers" and gold_number(texts["answer"]) is None:
        raise ValueError(f"{where}: no number can be read from {columns.answer_column!r}: {texts['answer'][-60:]!r}")
    return Row(row | texts, where, messages)


def _taken(row: dict[str, Any], column: str, where: str) -> Any:
    if column in row:
        return row.pop(column)
    value: Any = row
    try:
        for part in column.split("."):
            value = value[part]
    except (KeyError, TypeError) as problem:
        known = f"only {sorted(row)}; question_column and answer_column name them"
        raise ValueError(f"{where}: has no column {column!r}, {known}") from problem
    return value
