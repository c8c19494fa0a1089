"""Catalogue of bad inputs: what the program is told, how it ends, and what it says.

A case is a line of `CATALOGUE`. What can be known before the model is loaded is refused before it is loaded.
"""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.support.tiny import ROWS, TINY_RUN, jsonl
from trainer import run
from trainer.__main__ import main

PARSE, BEFORE, LATER = "settings", "before the model is loaded", "with the model"
EXIT = {PARSE: 2, BEFORE: 1, LATER: 1}
REWARDS = """
def raises(completions, **_): raise KeyError("difficulty")
def too_few(completions, **_): return [1.0]
def not_a_number(completions, **_): return [float("nan")] * len(completions)
def abstains(completions, **_): return [None] * len(completions)
def another_column(completions, difficulty, **_): return difficulty
def every_other(completions, **_): return [float(i % 2) for i in range(len(completions))]
def no_answer(text): raise RuntimeError("mine")
def beyond(text): return 0, len(text) + 5
def no_answer_in_thoughts(text): return None if "What" in text else 1 / 0
def no_importances(model, batch): raise RuntimeError("mine")
def few_importances(model, batch): return [[1.0]]
def no_weights(importances, units, answer, length): raise SystemExit("mine")
def negative(importances, units, answer, length): return [-1.0] * length
def broken(engine, *others): raise RuntimeError("no server")
"""


def row(**changes) -> dict:
    return ROWS[0] | changes


WEIGHTS, CONFIG, TOKENIZER = "m/model.safetensors", "m/config.json", "m/tokenizer.json"
OWN_DATA, OWN_MODEL = "--dataset={tmp}/rows.jsonl", "--model={tmp}/m"
ANY = "--reward_funcs=own:abstains"  # judges rows of any kind

MASKING = ["--estimator=masking"]
EVERY = ["--reward_funcs=own:every_other", "--eval_reward=own:every_other", "--no_mask_truncated_completions"]

# What is wrong: the flags, where the program ends, the words of its message, and files. Files of `m/` change a copy of
# the tiny model, None takes one away.
CATALOGUE: dict[str, tuple] = {
    # Files of settings
    "a folder of settings": (["--config={tmp}"], PARSE, "Is a directory", "{tmp}"),
    "settings in Latin-1": (["--config={tmp}/a.yaml"], PARSE, "a.yaml: is not YAML", "utf-8", {"a.yaml": b"a: \xe9"}),
    "settings with tags": (
        ["--config={tmp}/a.yaml"], PARSE, "a.yaml", "not YAML", "python/object",
        {"a.yaml": "max_steps: !!python/object/apply:os.getpid []"},
    ),
    "a model's defaults that do not parse": (
        [OWN_MODEL], PARSE, "m/defaults.yaml", "not YAML", {"m/defaults.yaml": "lora_r: {"},
    ),
    "a model's defaults that reach beyond it": (
        [OWN_MODEL], PARSE, "m/defaults.yaml: a model may set temperature, ", "not reward_timeout",
        {"m/defaults.yaml": "reward_timeout: 1"},
    ),
    # The run folder
    "a run folder that is a file": (
        ["--output_dir={tmp}/a"], BEFORE, "output_dir: ", "/a cannot be written: File exists", {"a": "text"},
    ),
    # What is not there
    "a tracker that is not installed": (["--report_to=wandb"], BEFORE, "report_to: wandb is not installed", "pip"),
    "a tracker that does not start": (
        ["--report_to=trackio"], LATER, "report_to: trackio cannot start: RuntimeError: no account",
        {"trackio.py": "def init(**_): raise RuntimeError('no account')"},
    ),
    "a GPU that is not there": (["--device=cuda:99"], BEFORE, "device: cuda:99 cannot be used"),
    "a device without memory": (["--device=meta"], BEFORE, "device: meta cannot be used"),
    # Reward functions as they are named
    "a module that raises": (
        ["--reward_funcs=raising:f"], BEFORE, "cannot import 'raising:f'", "RuntimeError: no key", {
            "raising.py": "raise RuntimeError('no key')",
        },
    ),
    "a reward of a column that is not there": (
        ["--reward_funcs=own:another_column"], BEFORE, "reward another_column: ", "'difficulty'", "'question'",
    ),
    # Data
    "a table of data": (["--dataset={tmp}/a.csv"], PARSE, "a.csv: expected a .json", {"a.csv": "a"}),
    "data in Latin-1": (
        [OWN_DATA], BEFORE, "rows.jsonl: cannot be read: UnicodeDecodeError",
        {"rows.jsonl": (jsonl(ROWS[0]) + '{"question": "café?", "answer": "1"}\n').encode("latin-1")},
    ),
    "data that are not JSON": (
        [OWN_DATA], BEFORE, "rows.jsonl: cannot be read", "in row 1", {"rows.jsonl": jsonl(ROWS[0], '{"question": ')},
    ),
    "half a character": (
        [OWN_DATA], BEFORE, "rows.jsonl: cannot be read", "surrogate", "row 0",
        {"rows.jsonl": jsonl(row(question="What \ud83d ?"))},
    ),
    "another name of the column": (
        [OWN_DATA], BEFORE, "row 0: has no column 'question'", "['prompt']", "question_column",
        {"rows.jsonl": jsonl({"prompt": "3?"})},
    ),
    **{
        f"a column named {name}": (
            [OWN_DATA], BEFORE, f"rows.jsonl: has a column {name!r}", "rename",
            {"rows.jsonl": jsonl(*(one | {name: 1} for one in ROWS))},
        )
        for name in ("prompts", "completion_contents")
    },
    "text for Parquet": (
        ["--dataset={tmp}/a.parquet"], BEFORE, "dataset {tmp}/a.parquet: cannot be read", {"a.parquet": "x"},
    ),
    # Prompts
    "a prompt that the context does not hold": (
        [OWN_DATA, "--max_completion_length=100"], BEFORE, "rows.jsonl, row 5: the prompt has 42 tokens, at most 28",
        {"rows.jsonl": jsonl(*ROWS[:5], row(question="What is 3 + 4 ?" + " 3" * 35), *ROWS[5:])},
    ),
    **{
        f"a chat template that {what}": (
            [OWN_MODEL], BEFORE, "row ", says, {"m/chat_template.jinja": template},
        )
        for what, template, says in (
            ("raises", "{{ raise_exception('System role not supported') }}", "fails: TemplateError: System role not"),
            ("does not parse", "{% for message in messages %}", "fails: TemplateSyntaxError: "),
        )
    },
    "a chat template that takes content in parts": (
        [OWN_MODEL], BEFORE, "model {tmp}/m: its chat template drops the question 'What is 3 + 4?'", "not in parts",
        {"m/chat_template.jinja": "{% for part in messages[0]['content'] %}{{ part['text'] }}{% endfor %}assistant"},
    ),
    "a chat template that ends the text": (
        [OWN_MODEL], BEFORE, "model {tmp}/m: its prompts end in '<eos>', the token that ends or", "add_eos_token",
        {"m/chat_template.jinja": "user {{ messages[0]['content'] }} <eos>"},
    ),
    "a tokenizer that ends every text": (
        [OWN_MODEL], BEFORE, "model {tmp}/m: its prompts end in '<eos>', the token that ends or", "add_eos_token",
        {"ends": "<eos>", "m/chat_template.jinja": None},
    ),
    # The model's folder
    "a model that is a file": (["--model={tmp}/a"], PARSE, "{tmp}/a: there is no such folder", {"a": "text"}),
    "no configuration": ([OWN_MODEL], BEFORE, "{tmp}/m: its configuration cannot be loaded", {CONFIG: None}),
    "a model of no known kind": (
        [OWN_MODEL], BEFORE, "model {tmp}/m: ", "qwen99", {CONFIG: '{"model_type": "qwen99"}'},
    ),
    "no language model": ([OWN_MODEL], LATER, "model {tmp}/m: ", "ViTConfig", {CONFIG: '{"model_type": "vit"}'}),
    "no tokenizer": (
        [OWN_MODEL], BEFORE, "model {tmp}/m: ", "tokenizer", {TOKENIZER: None, "m/tokenizer_config.json": None},
    ),
    "a tokenizer cut short": ([OWN_MODEL], BEFORE, "model {tmp}/m: ", "tokenizer", {TOKENIZER: '{"version": '}),
    "a tokenizer that can neither pad nor end": (
        [OWN_MODEL], BEFORE, "model {tmp}/m: its tokenizer has neither a pad nor an end-of-text token",
        {"m/tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}'},
    ),
    "completions that cannot end": (
        [OWN_MODEL], LATER, "model {tmp}/m: neither its tokenizer nor its generation settings name", "eos_token",
        {"no end": 1, "m/tokenizer_config.json": '{"tokenizer_class": "TokenizersBackend", "pad_token": "<pad>"}'},
    ),
    "a tokenizer of another model": (
        [OWN_MODEL], BEFORE, "model {tmp}/m: ", "its tokenizer", "vocabulary", "vocab_size 4", {"vocabulary": 4},
    ),
    **{
        what: ([OWN_MODEL], LATER, "model {tmp}/m: its weights cannot be loaded", files)
        for what, files in {
            "weights cut short": {"cut": 0.5},
            "a shard that is missing": {
                WEIGHTS: None,
                "m/model.safetensors.index.json": '{"metadata": {}, "weight_map": {"a": "b.safetensors"}}',
            },
        }.items()
    },
    # What reward functions give
    "a reward that raises": (
        ["--reward_funcs=own:raises"], LATER, "row ", "reward raises raised KeyError: 'difficulty' (in own.py, line 2)",
    ),
    "a reward of nan": (["--reward_funcs=own:not_a_number"], LATER, "reward not_a_number is nan", "step is not saved"),
    # Code of one's own that credit and rollouts run
    "an environment that fails": (
        ["--environment=own:broken", ANY], LATER, "environment own:broken raised RuntimeError: no server (in own.py",
    ),
    "a form of answers that raises": (
        ["--answer_format=own:no_answer", ANY], BEFORE, "answer_format own:no_answer raised RuntimeError: mine (in own",
    ),
    "a form of answers that gives no span": (
        ["--answer_format=own:beyond", ANY], BEFORE, "answer_format own:beyond: answer_format must return None or (",
    ),
    **{
        f"credit by {name}": ([*flags, *EVERY], LATER, "step 1, ", f"own:{name}{said}", "this step is not saved")
        for name, said, *flags in (
            ("no_answer_in_thoughts", " raised ZeroDivisionError: division by zero (in own.py, line ",
             "--answer_format=own:no_answer_in_thoughts"),
            ("no_importances", " raised RuntimeError: mine (in own.py, line ", "--estimator=own:no_importances"),
            ("few_importances", ": estimator: gave values for 1 rows, asked for 4", "--estimator=own:few_importances"),
            ("no_weights", " raised SystemExit: mine (in own.py, line ", "--weights=own:no_weights", *MASKING),
            ("negative", ": weights, row ", "--weights=own:negative", *MASKING),
        )
    },
    "too few rewards in evaluation": (
        ["--eval_reward=own:too_few", ANY], LATER, "step 0, reward of evaluation: returned 1 values for 2 completions",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tiny_folder) -> Path:
    """A folder with a model, data and reward functions that nothing is wrong with."""
    (tiny_folder / "own.py").write_text(REWARDS)
    return tiny_folder


def flags_of(good: Path, out: Path) -> list[str]:
    return [f"--model={good / 'model'}", f"--dataset={good / 'rows.jsonl'}", f"--output_dir={out}", *TINY_RUN]


def spoil(folder: Path, good: Path, files: dict) -> None:
    """Write a case's files; what is no path changes the copy of the model."""
    model = folder / "m"
    if any(name.startswith("m/") or "." not in name for name in files):
        shutil.copytree(good / "model", model)
    for name, content in files.items():
        path = folder / name
        if name == "ends":
            tokenizer = json.loads((folder / TOKENIZER).read_text())
            last = {"id": content, "ids": [tokenizer["model"]["vocab"][content]], "tokens": [content]}
            tokenizer["post_processor"] = {
                "type": "TemplateProcessing", "pair": [], "special_tokens": {content: last},
                "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": content, "type_id": 0}}],
            }  # fmt: skip
            (folder / TOKENIZER).write_text(json.dumps(tokenizer))
        elif name == "cut":
            whole = (folder / WEIGHTS).read_bytes()
            (folder / WEIGHTS).write_bytes(whole[: int(len(whole) * content)])
        elif name == "vocabulary":
            config = json.loads((folder / CONFIG).read_text())
            (folder / CONFIG).write_text(json.dumps(config | {"vocab_size": content}))
        elif name == "no end":
            for file in ("config.json", "generation_config.json"):
                (model / file).write_text(json.dumps(json.loads((model / file).read_text()) | {"eos_token_id": None}))
        elif content is None:
            path.unlink()
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize("case", CATALOGUE)
def test_what_is_wrong_is_said_in_one_line(case, good, tmp_path, capsys, monkeypatch) -> None:
    argv, stage, *says = CATALOGUE[case]
    files = says.pop() if isinstance(says[-1], dict) else {}
    spoil(tmp_path, good, files)

    def filled(text: str) -> str:
        return text.replace("{tmp}", str(tmp_path)).replace("{data}", str(good / "rows.jsonl"))

    out = tmp_path / "out"
    flags = [*flags_of(good, out), *map(filled, argv)]
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    monkeypatch.syspath_prepend(good)
    monkeypatch.syspath_prepend(tmp_path)
    if stage != LATER:
        monkeypatch.setattr(run, "load_policy", lambda *_: pytest.fail("the model was loaded before"))
    try:
        code = main(flags)
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.modules.pop("trackio", None)  # the case's own
    said = capsys.readouterr()
    line = " ".join(re.sub("[─│╭╮╰╯]|-{4,}", " ", said.err).split())  # without the frame of tyro's messages
    assert code == EXIT[stage], line
    assert "Traceback" not in said.out + said.err
    if stage != PARSE:
        line = said.err.strip().splitlines()[-1]
        assert line.startswith("error: ")
    assert len(line) < 700
    for words in says:
        assert filled(words) in line
    if stage != LATER:
        assert not out.exists()


@pytest.mark.parametrize("problem", [torch.OutOfMemoryError("CUDA out of memory.\nTried 3 GiB"), MemoryError("host")])
def test_a_step_without_memory_says_what_to_lower(good, tmp_path, capsys, monkeypatch, problem) -> None:
    def attempt(*_):
        raise problem

    monkeypatch.setattr(run, "training_step", attempt)
    assert main(flags_of(good, tmp_path / "out")) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: out of memory (")
    assert line.endswith("; lower token_budget, max_completion_length or num_generations")


def test_a_mistake_of_ours_keeps_its_traceback(good, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run, "training_step", lambda *_: {}["no such key"])
    with pytest.raises(KeyError):
        main(flags_of(good, tmp_path / "out"))
