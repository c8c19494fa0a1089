"""Load problems to train and evaluate on from a file, the hub or the generator, and check them row by row.

A row has at least `question` and `answer`, both text, or for MBPP `question` and `tests`; other columns, the same in
all rows, go to reward functions.
"""

import functools
import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer.config import GENERATED, DataConfig, TrainConfig
from trainer.embedded.problems import generate
from trainer.rewards.calls import ARGUMENTS
from trainer.rewards.code.mbpp import mbpp_row
from trainer.rewards.numbers import gold_number


class Row(dict[str, Any]):
    """Columns of one problem; `where` names the data set and the row in it, counted from 0."""

    def __init__(self, columns: Mapping[str, Any], where: str = "a row") -> None:
        super().__init__(columns)
        self.where = where


GENERATED_TRAIN_PROBLEMS = 8192
HELD_OUT_PROBLEMS = 256
# Reinforcement learning's own stream of generated problems, whatever the seed of the run, so that runs compare.
GENERATED_SEED = 1


def load_rows(
    name: str,
    *,
    split: str,
    count: int | None = None,
    config: str | None = None,
    question_column: str = "question",
    answer_column: str = "answer",
    kind: str = "numbers",
    seed: int = GENERATED_SEED,
) -> list[Row]:
    """Read, rename to `question` and `answer`, and check the first `count` rows of a data set.

    `name` is a .jsonl or .parquet file, "generated", or a hub name; `split` and `config` are for the latter
    two, `kind` that of a config. Raises `ValueError` that names data set, row (counted from 0) and reason.
    """
    path = Path(name)
    if name == GENERATED:
        problems = itertools.islice(generate(split, seed), count or GENERATED_TRAIN_PROBLEMS)
        return [
            Row({"question": problem.question, "answer": problem.solution()}, f"dataset {name}, row {i}")
            for i, problem in enumerate(problems)
        ]
    if path.suffix in _READERS and path.exists() and not path.is_file():
        raise ValueError(f"dataset {name}: is not a regular file; save the rows to one first")
    if path.suffix in _READERS:
        try:
            rows = _READERS[path.suffix](path)
        except OSError as problem:
            raise type(problem)(f"dataset {name}: cannot be read: {problem.strerror or problem}") from problem
    elif path.suffix in (".json", ".csv", ".txt") or path.exists():
        raise ValueError(f"dataset {name}: expected a .jsonl or .parquet file, a hub name or {GENERATED!r}")
    else:
        rows = _read_hub(name, config, split)
    rows = rows[:count]
    if not rows:
        raise ValueError(f"dataset {name}: has no rows")
    checked = []
    for i, row in enumerate(rows):
        where = f"dataset {name}, row {i}"
        checked.append(Row(_checked(row, where, kind, question_column, answer_column), where))
    _require_same_columns(checked, name)
    return checked


def train_and_eval_rows(config: DataConfig, *, seed: int = GENERATED_SEED) -> tuple[list[Row], list[Row]]:
    """Load training and held-out problems, disjoint by question; `seed` draws generated training problems.

    What is held out depends only on the settings in `config`: problems that warm-up holds out are held out of
    reinforcement learning with the same settings too.
    """
    read = functools.partial(
        load_rows, question_column=config.question_column, answer_column=config.answer_column, kind=config.kind
    )
    train = read(
        config.dataset, split=config.dataset_split, count=config.train_problems, config=config.dataset_config, seed=seed
    )
    held_out = config.eval_problems
    if config.eval_dataset is not None:
        test = read(config.eval_dataset, split=config.eval_split, count=held_out)
    elif config.dataset == GENERATED:
        test = load_rows(GENERATED, split="test", count=held_out or HELD_OUT_PROBLEMS)
    elif Path(config.dataset).suffix:
        random.Random(0).shuffle(train)
        held_out = held_out or HELD_OUT_PROBLEMS
        if held_out >= len(train):
            raise ValueError(f"eval_problems: cannot set {held_out} of {len(train)} rows of {config.dataset} aside")
        test, train = train[:held_out], train[held_out:]
    else:
        test = read(config.dataset, split=config.eval_split, count=held_out, config=config.dataset_config)
    seen = {row["question"] for row in test}
    train = [row for row in train if row["question"] not in seen]
    if not train:
        raise ValueError(f"dataset {config.dataset}: every training problem is also held out")
    return train, test


def encode_prompt(
    question: str, tokenizer: PreTrainedTokenizerBase, *, instruction: str = "", enable_thinking: bool = False
) -> list[int]:
    """Encode the prompt: by the chat template if the tokenizer has one, else `Question: ... Answer:`."""
    content = f"{question}\n{instruction}" if instruction else question
    if tokenizer.chat_template is None:
        return tokenizer(f"Question: {content}\nAnswer:")["input_ids"]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=enable_thinking,
    )
    # The template writes the special tokens itself.
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def longest_prompt(config: TrainConfig, context: int | None) -> int | None:
    """Give the most tokens of a prompt: the least that `max_prompt_length` and `context` leave; None without either."""
    limits = [
        limit for limit in (config.max_prompt_length, context and context - config.max_completion_length) if limit
    ]
    return min(limits, default=None)


def encode_prompts(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, config: TrainConfig, context: int | None
) -> list[list[int]]:
    """Encode the prompts of all rows; one too long for the settings or the context is an error that names it."""
    limit, completion = longest_prompt(config, context), config.max_completion_length
    if context is not None and completion >= context:
        raise ValueError(
            f"max_completion_length {completion} leaves no place for a prompt in the context of {context} tokens that "
            f"model {config.model} has; it must be at most {context - 1}, less the longest prompt"
        )
    prompts = []
    for row in rows:
        try:
            ids = encode_prompt(
                row["question"], tokenizer, instruction=config.instruction or "", enable_thinking=config.enable_thinking
            )
        except Exception as problem:  # a chat template raises what it likes
            said = f"{type(problem).__name__}: {problem}"
            raise ValueError(f"{row.where}: the chat template of model {config.model} fails: {said}") from problem
        if not ids:
            raise ValueError(f"{row.where}: the chat template of model {config.model} writes an empty prompt")
        if limit is not None and len(ids) > limit:
            raise ValueError(
                f"{row.where}: the prompt has {len(ids)} tokens, at most {limit} fit "
                f"(max_prompt_length {config.max_prompt_length}; context {context} less max_completion_length "
                f"{completion}): {row['question'][:60]!r}; shorten or remove it, or change these settings"
            )
        prompts.append(ids)
    return prompts


def _checked(row: Any, where: str, kind: str, question_column: str, answer_column: str) -> dict[str, Any]:
    """Give one row with what its kind demands, or raise a `ValueError` that says what is wrong with it."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object with named columns, got {type(row).__name__}")
    if kind == "mbpp":
        return mbpp_row(row, where)
    texts = {}
    for role, column in (("question", question_column), ("answer", answer_column)):
        if column not in row:
            raise ValueError(
                f"{where}: has no column {column!r}; its columns are {sorted(row)}; name the one by {role}_column"
            )
        value = row[column]
        if role == "answer" and isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str):
            raise ValueError(f"{where}: column {column!r} must be text, got {value!r}")
        if not value.strip():
            raise ValueError(f"{where}: column {column!r} is empty")
        if half := next((character for character in value if "\ud800" <= character <= "\udfff"), None):
            raise ValueError(f"{where}: column {column!r} holds {half!r}, half of a character, which is no text")
        texts[role] = value
    if kind == "numbers" and gold_number(texts["answer"]) is None:
        raise ValueError(f"{where}: no number can be read from column {answer_column!r}: {texts['answer'][-60:]!r}")
    others = {name: value for name, value in row.items() if name not in (question_column, answer_column)}
    return others | texts


def _require_same_columns(rows: Sequence[Row], name: str) -> None:
    """Raise `ValueError` for a column that only some rows have, or that has a name which reward functions know."""
    if taken := [column for column in ARGUMENTS if column in rows[0]]:
        raise ValueError(
            f"dataset {name}: has a column {taken[0]!r}, a name under which reward functions are given something else; "
            "rename the column"
        )
    for row in rows:
        for column in sorted(row.keys() ^ rows[0].keys()):
            found = (
                "has no column {!r}, which row 0 has" if column in rows[0] else "has a column {!r}, which row 0 has not"
            )
            raise ValueError(f"{row.where}: {found.format(column)}; a column must be in all rows, if need be as null")


def _read_jsonl(path: Path) -> list[Any]:
    rows = []
    with path.open("rb") as lines:
        for i, line in enumerate(lines):
            try:
                rows.append(json.loads(line.decode("utf-8-sig")))
            except UnicodeDecodeError as problem:
                raise ValueError(
                    f"dataset {path}, row {i}: is not UTF-8 text (byte {line[problem.start]:#x}); save it as UTF-8"
                ) from problem
            except (ValueError, RecursionError) as problem:
                raise ValueError(f"dataset {path}, row {i}: is not JSON: {problem}") from problem
    return rows


def _read_parquet(path: Path) -> list[Any]:
    import pyarrow.parquet  # comes with datasets; read only in this mode

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as problem:
        raise ValueError(f"dataset {path}: is not a Parquet file: {problem}") from problem


_READERS: dict[str, Callable[[Path], list[Any]]] = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
"""Readers of files, by suffix."""


def _read_hub(name: str, config: str | None, split: str) -> list[Any]:
    import datasets  # slow to import, and needed only in this mode

    try:
        configs = [config] if config is not None else datasets.get_dataset_config_names(name)
        chosen = configs[0] if len(configs) == 1 else "main"
        if chosen in configs:
            return datasets.load_dataset(name, chosen, split=split).to_list()
    except Exception as problem:  # of the library, of the network, of a file of any kind
        said = str(problem).partition("\n")[0]
        raise ValueError(
            f"dataset {name}: split {split!r} cannot be read from the hub: {type(problem).__name__}: {said}"
        ) from problem
    raise ValueError(f"dataset {name}: has several configurations, choose dataset_config from {configs}")
