"""Tables of an analysis: against hand examples, bad input and a real run."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from tests.support.embedded import EVERY_OTHER, run
from tests.support.pages import write_lines
from trainer.analyze.__main__ import main
from trainer.analyze.tables import CLASSES, analyse
from trainer.report.runs import Sample, read_samples

pytestmark = pytest.mark.slow


def write(folder: Path, *entries: object) -> Path:
    return write_lines(folder / "completions.jsonl", entries)


def spans(*rows: tuple[int, int, float]) -> list[dict]:
    return [dict(zip(("start", "end", "drop"), row, strict=True)) for row in rows]


def example(folder: Path) -> list[Sample]:
    """A correct completion of ten tokens and a wrong one of four, with hand-made drops."""
    return list(read_samples(
        write(
            folder,
            {
                "tokens": list("Step1=2+3.") , "answer": {"start": 9, "end": 10}, "reward": 1.0, "advantage": 1.0,
                "spans": spans((0, 2, -0.5), (4, 7, 4.0), (7, 9, 2.0)), "credit": "masking",
                "weights": [1, 1, 1, 1, 4, 4, 4, 2, 2, 1.5],
                "estimators": {"entropy": {"importances": [0, 1, 2, 3, 4, 5, 6, 7, 8, None]}},
            },
            {
                "tokens": ["a ", "1+1=2 ", "c ", "d"], "reward": 0.0, "advantage": -1.0,
                "spans": [{"start": 1, "end": 2, "drop": 6.0, "text": "1+1=2"}, {"start": 2, "end": 3, "drop": 0.0}],
                "weights": [1, 3, 0, 1], "credit": "masking",
            },
            {"tokens": ["cut"], "truncated": True, "weights": [9], "credit": "masking", "reward": 0.0},
            {"tokens": ["idle"], "advantage": 0.0, "weights": [9], "credit": "masking", "reward": 0.0},
        )
    ))  # fmt: skip


def rows(tables: dict, title: str) -> dict[str, list]:
    (table,) = (table for name, table in tables.items() if name.startswith(title))
    return {name: list(row) for name, row in zip(table.index, table.to_numpy(), strict=True)}


def test_tables_of_a_hand_made_example_hold_the_numbers_worked_out_by_hand(tmp_path) -> None:
    tables = analyse(example(tmp_path))
    overview = rows(tables, "Overview")
    for name, count in (("completions", 4), ("tokens", 16), ("correct", 1), ("masked spans", 5)):
        assert overview[name] == [count]

    drops = np.array([-0.5, 4.0, 2.0, 6.0, 0.0])
    distribution = rows(tables, "Drops of masked spans, nats")
    assert distribution["mean"] == [pytest.approx(2.3)]
    assert distribution["std"] == [pytest.approx(drops.std(ddof=1))]
    assert (distribution["min"], distribution["50%"]) == ([-0.5], [2.0])

    # The 0.9, 0.6 and 0.1 quantiles of the drops that matter, 6, 4 and 2, are 5.6, 4.4 and 2.4.
    classes = rows(tables, "Classes of drops")
    assert [classes[name][0] for name in CLASSES[:2:-1]] == pytest.approx([5.6, 4.4, 2.4])
    assert [classes[name][1] for name in CLASSES[::-1]] == [1, 0, 1, 1, 1, 1]

    thirds = rows(tables, "Drop by place")  # of 9 tokens before the answer, and of 4
    assert {name: row[:2] for name, row in thirds.items()} == {
        "early": [1, -0.5], "middle": [3, pytest.approx(10 / 3)], "late": [1, 2.0],
    }  # fmt: skip
    half = 1.96 * math.hypot(4 - 10 / 3, 6 + 0 - 20 / 3) / 3  # the middle's 4 is of one completion, 6 and 0 of another
    assert thirds["middle"][2:4] == pytest.approx([10 / 3 - half, 10 / 3 + half])
    assert {name: row[0] for name, row in rows(tables, "Drop by kind").items()} == {"calculation": 2, "statement": 3}
    correctness = rows(tables, "Drop by correctness")
    assert {name: row[:2] for name, row in correctness.items()} == {
        "correct": [3, pytest.approx(5.5 / 3)],
        "wrong": [2, 3.0],
    }


def test_concentration_counts_only_completions_that_train(tmp_path) -> None:
    row = rows(analyse(example(tmp_path)), "Concentration")["masking"]
    first, second = [1, 1, 1, 1, 4, 4, 4, 2, 2, 1.5], [1, 3, 0, 1]
    ess = np.mean([sum(w) ** 2 / (len(w) * sum(x * x for x in w)) for w in (first, second)])
    assert row == pytest.approx([2, 26.5 / 14, 0, 4, ess, (4 / 21.5 + 3 / 5) / 2])


def test_single_tokens_are_not_judged_by_content_and_units_are_not_mixed(tmp_path) -> None:
    entry = {"tokens": ["a", "b"], "spans": spans((0, 1, 0.5), (1, 2, 1e-5)), "drops_unit": "gradient x input"}
    tables = analyse([*read_samples(write(tmp_path, entry))])
    assert "Drops of masked spans, gradient x input" in tables
    assert rows(tables, "Classes")["no effect"][1] == 0  # nothing is rounding in a unit of its own
    assert not any("content" in title for title in tables)
    with pytest.raises(ValueError, match="drops must be in one unit, got gradient x input, nats"):
        analyse([*read_samples(write(tmp_path, entry, {**entry, "drops_unit": "nats"}))])


def test_a_run_with_signed_credit_is_analysed_end_to_end_by_the_advantages_it_trained_on(tmp_path, capsys) -> None:
    options = ("--estimator=prefix_tree", "--max_steps=1", "--eval_problems=1", "--log_completions=8", EVERY_OTHER)
    folder = run(tmp_path / "run", *options)
    capsys.readouterr()
    assert main([str(folder)]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    for title in ("Overview\n", "Drops of masked spans, importance by prefix_tree\n", "Concentration"):
        assert title in printed
    assert re.search(r"^completions +8$", printed, re.MULTILINE)
    advantages = [sample["credit"]["prefix_tree, advantages"]["values"] for sample in read_samples(folder)]
    assert any(len(set(row)) > 1 for row in advantages)
