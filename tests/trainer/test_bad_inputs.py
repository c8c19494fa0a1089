"""What the program is told, how it ends, and what it says: a case is a line of a table."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.support.tiny import ROWS, TINY_RUN, jsonl
from trainer import run
from trainer.__main__ import main

OWN = """
def raises(completions, **_): raise KeyError("difficulty")
def too_few(completions, **_): return [1.0]
def abstains(completions, **_): return [None] * len(completions)
def another_column(completions, difficulty, **_): return difficulty
def wordless(*parts):
    from examples.environments import PlayedEngine
    return PlayedEngine(type("Wordless", (), {"call": "(?s).", "reset": list, "step": lambda *_: ""}), *parts)
"""
CONFIG, TOKENIZER, TEMPLATE = "m/config.json", "m/tokenizer.json", "m/chat_template.jinja"
DATA, MODEL, ANY = "--dataset={tmp}/rows.jsonl", "--model={tmp}/m", "--reward_funcs=own:abstains"
NAMELESS = '{"tokenizer_class": "TokenizersBackend", "pad_token": "<pad>"}'

# Flags, words of the message, and files; those of `m/` change a copy of the tiny model, None takes one away.
SETTINGS: list[tuple] = [
    ("--config={tmp}/a.yaml", "python/object", {"a.yaml": "max_steps: !!python/object/apply:os.getpid []"}),
    (MODEL, "not reward_timeout", {"m/defaults.yaml": "reward_timeout: 1"}),
    ("--dataset={tmp}/a.csv", "a.csv: expected a .json", {"a.csv": "a"}),
    ("--model={tmp}/a.txt", "{tmp}/a.txt: there is no such folder", {"a.txt": "text"}),
]
BEFORE_THE_MODEL: list[tuple] = [
    ("--output_dir={tmp}/a.txt", "File exists: '{tmp}/a.txt'", {"a.txt": "text"}),
    ("--report_to=wandb", "report_to: wandb is not installed (pip install wandb)"),
    ("--device=cuda:99", "device: cuda:99 cannot be used"),
    ("--reward_funcs=raising:f", "cannot import 'raising:f'", {"raising.py": "raise RuntimeError('no key')"}),
    ("--reward_funcs=own:another_column", "reward another_column: "),
    (DATA, "rows.jsonl: cannot be read", {"rows.jsonl": jsonl(ROWS[0], '{"question": ')}),
    (DATA, "has a column 'prompts'", {"rows.jsonl": jsonl(*(one | {"prompts": 1} for one in ROWS))}),
    (DATA + " --max_completion_length=100", "rows.jsonl, row 5: the prompt has 42 tokens, and 28 fit",
     {"rows.jsonl": jsonl(*ROWS[:5], ROWS[5] | {"question": "What is 3 + 4 ?" + " 3" * 35}, *ROWS[5:])}),
    (MODEL, "the prompt: TemplateError('No system role')", {TEMPLATE: "{{ raise_exception('No system role') }}"}),
    (MODEL, "m: its chat template drops the question",
     {TEMPLATE: "{% for part in messages[0]['content'] %}{{ part['text'] }}{% endfor %}assistant"}),
    (MODEL, "m: its prompts end in the token that ends", {TEMPLATE: "user {{ messages[0]['content'] }} <eos>"}),
    (MODEL, "m: cannot be loaded: ", {CONFIG: None}),
    (MODEL, "model {tmp}/m: ", {TOKENIZER: None, "m/tokenizer_config.json": None}),
    (MODEL, "and its vocab_size is 4", {"vocab_size": 4}),
]  # fmt: skip
WITH_THE_MODEL: list[tuple] = [
    ("--report_to=trackio", "trackio cannot start: RuntimeError: no account",
     {"trackio.py": "def init(**_): raise RuntimeError('no account')"}),
    (MODEL, "m: no token ends a completion",
     {"eos_token_id": None, "m/tokenizer_config.json": NAMELESS}),
    ("--reward_funcs=own:raises", "reward raises raised KeyError: 'difficulty' (in own.py, line 2); this step is not"),
    ("--environment=own:wordless", "error: step 0, held-out problem 0, turn 0: environment's step must return a text"),
    ("--eval_reward=own:too_few " + ANY, "step 0, reward of evaluation: returned 1 values, expected a list"),
]  # fmt: skip
CASES = [*((2, *one) for one in SETTINGS), *((1, *one) for one in [*BEFORE_THE_MODEL, *WITH_THE_MODEL])]


@pytest.fixture(scope="module")
def good(tiny_folder) -> Path:
    """A folder with a model, data and reward functions that nothing is wrong with."""
    (tiny_folder / "own.py").write_text(OWN)
    return tiny_folder


def flags_of(good: Path, out: Path) -> list[str]:
    return [f"--model={good / 'model'}", f"--dataset={good / 'rows.jsonl'}", f"--output_dir={out}", *TINY_RUN]


def spoil(folder: Path, good: Path, files: dict) -> None:
    """Write a case's files; a name without a point changes the copy of the model."""
    if any(name.startswith("m/") or "." not in name for name in files):
        shutil.copytree(good / "model", folder / "m")
    for name, content in files.items():
        path = folder / name
        if "." not in name:
            for file in (folder / CONFIG, folder / "m/generation_config.json"):
                file.write_text(json.dumps(json.loads(file.read_text()) | {name: content}))
        elif content is None:
            path.unlink()
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1]}: {case[2]}")
def test_what_is_wrong_is_said_in_one_line(case, good, tmp_path, monkeypatch, capsys) -> None:
    code, flags, words, *files = case
    spoil(tmp_path, good, *files or [{}])
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    monkeypatch.syspath_prepend(good)
    monkeypatch.syspath_prepend(tmp_path)
    if case[1:] not in WITH_THE_MODEL:
        monkeypatch.setattr(run, "load_policy", lambda *_, **__: pytest.fail("the model was loaded before"))
    try:
        ended = main([*flags_of(good, tmp_path / "out"), *flags.replace("{tmp}", str(tmp_path)).split()])
    except SystemExit as ending:
        ended = ending.code
    finally:
        sys.modules.pop("trackio", None)  # the case's own
    line = capsys.readouterr().err.splitlines()[-1]
    assert ended == code
    assert line.partition("error: ")[0] == ("" if code == 1 else "python -m trainer: ")
    assert words.replace("{tmp}", str(tmp_path)) in line
    assert case[1:] in WITH_THE_MODEL or not (tmp_path / "out").exists()


@pytest.mark.parametrize("problem", [torch.OutOfMemoryError("CUDA out of memory.\nTried 3 GiB"), MemoryError("host")])
def test_a_step_without_memory_says_what_to_lower(good, tmp_path, monkeypatch, capsys, problem) -> None:
    def attempt(*_):
        raise problem

    monkeypatch.setattr(run, "training_step", attempt)
    assert main(flags_of(good, tmp_path / "out")) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: rank 0: out of memory (")
    assert line.endswith("; lower token_budget, max_completion_length or num_generations")


@pytest.mark.parametrize(
    ("where", "note"), [("training_step", "step 1; this step is not saved"), ("save_policy", "step 1")]
)
def test_a_mistake_of_ours_keeps_its_traceback_and_names_a_step_that_is_lost(
    where, note, good, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(run, where, lambda *_: {}["no such key"])
    with pytest.raises(KeyError) as raised:
        main(flags_of(good, tmp_path / "out"))
    assert raised.value.__notes__ == [note]
