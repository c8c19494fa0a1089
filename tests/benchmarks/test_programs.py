"""Small programs: what they return and rest on, what their reward passes, and how credit is summed up."""

import itertools
import re
from types import SimpleNamespace

import pytest

from benchmarks.demo_model.warmup import WarmupConfig, small_model, train_tokenizer
from benchmarks.evidence import programs
from benchmarks.evidence.models import Subject
from benchmarks.evidence.programs import AUROCS, KINDS, METHODS, ProgramsSettings, executed, judge, markdown, rows
from cfa_kernels import SpanRules
from trainer import one_page

SOME = list(itertools.islice(rows("train", 3, 60, slip=0.3), 60))
PROGRAMS = [row["answer"].rpartition("\nf(")[0] for row in SOME]


def called(program, x):
    """What Python itself returns."""
    names = {}
    exec(program, names)
    return names["f"](x)


def test_a_program_returns_what_python_says_and_rests_on_the_lines_that_change_it():
    seen = set()
    for program, row in zip(PROGRAMS, SOME, strict=True):
        value, values, kinds = executed(program, row["x"])
        assert called(program, row["x"]) == value == int(row["answer"].rpartition("#### ")[2])
        lines = program.split("\n")
        assert len(kinds) == len([*lines, "call"])
        assert all(
            re.search(r"# (-?\d+)$", lines[i])[1] == str(number) for i, number in values.items() if "#" in program
        )
        for i, kind in enumerate(kinds[:-2]):
            other = re.sub(r"(\d+)(:?(  #.*)?)$", lambda found: f"{int(found[1]) + 40}{found[2]}", lines[i])
            changed = called("\n".join([*lines[:i], other, *lines[i + 1 :]]), row["x"]) != value
            assert not (changed and kind == "i")
            assert changed or kind not in "bl" or "if" in other or "*" in other
        seen |= set(kinds)
    assert seen == set(KINDS)


def test_rows_are_those_of_their_seed_and_right_but_for_slips():
    assert SOME == list(rows("train", 3, 60, slip=0.3)) != list(rows("test", 3, 60, slip=0.3))
    for row in rows("test", 4, 20):
        for test in row["tests"]:
            exec(f"{row['answer'].rpartition('####')[0]}\n{test}", {})
        assert row["tests"][0].endswith(f" == {row['answer'].rpartition('#### ')[2]}")


def test_a_program_that_returns_nothing_is_an_error():
    with pytest.raises(ValueError, match="returns nothing: 'def f"):
        executed("def f(x):\n    a = x + 1", 1)


def test_lines_are_the_statements_of_the_python_detector():
    for program in (program for program in PROGRAMS if "#" not in program):
        statements, sentences = (SpanRules(name).ranked_intervals(program) for name in ("python", "sentence"))
        assert sorted(itertools.chain(*statements)) == sorted(itertools.chain(*sentences))


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config = WarmupConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    tokenizer = train_tokenizer(SOME, 400, single_digits=False)
    small_model(config, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Subject(one_page.Settings(model=str(folder)))


@pytest.mark.slow
def test_programs_that_pass_are_judged_line_by_line(subject, monkeypatch):
    texts = [row["answer"] for row in SOME[:-1]] + ["no program"]
    monkeypatch.setattr(programs, "sample", lambda *_, **__: SimpleNamespace(texts=texts))
    result = judge(subject, SOME, ProgramsSettings(isolation="none"))
    passing = [
        program for program, row in zip(PROGRAMS[:-1], SOME, strict=False)
        if all(called(program, int(x)) == int(y) for x, y in re.findall(r"f\((\d+)\) == (-?\d+)", str(row["tests"])))
    ]  # fmt: skip
    assert 10 < len(passing) == result["programs"] < len(SOME) - 10
    assert (result["right"], result["own"]) == (pytest.approx(len(passing) / len(SOME)), 1.0)
    assert set(result["methods"]) == {"equal credit", *METHODS}
    for name, figures in result["methods"].items():
        assert sum(figures[kind]["value"] for kind in KINDS.values()) == pytest.approx(1)
        assert (figures["call"]["value"] == 0) == (name == "prefix gain")
    assert all(result["methods"]["equal credit"][name]["value"] == 0.5 for name in AUROCS)
    assert result["methods"]["equal credit"]["`def`"] == result["methods"]["equal credit"]["return"]
    assert 0 <= result["masked"] < result["probability"] < 0.1
    texts[:] = ["no program"] * len(texts)
    with pytest.raises(ValueError, match="model: none of 60 programs passes"):
        judge(subject, SOME, ProgramsSettings(isolation="none"))


def test_shares_and_auroc_are_those_of_a_count_by_hand():
    figures = programs.summary([[0, 0, 1, -5, 2, 1, 0], [0, 0, 2, 0, -1, 2, 4]], ["dibilrc", "diblirc"])
    shares = {"`def`": 0, "idle": 0, "needed before": 0.25, "needed last": 0.25, "return": 0.25, "call": 0.25}
    assert {name: figures[name]["value"] for name in shares} == shares
    of = {"programs": 2, "right": 0.5, "own": 1.0, "probability": 0.9, "masked": 0.2, "methods": {"CF": figures}}
    page = markdown({"without values": of, "with values": of, "command": "c", "environment": {"commit": "a"}})
    assert page.count("| CF | 0.00 (0.00 to 0.00) | 0.00 (0.00 to 0.00) | 0.25 (0.25 to 0.25) |") == 2
