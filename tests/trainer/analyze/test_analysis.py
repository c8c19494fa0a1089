"""Tables and page of an analysis: against hand examples, bad input and a real run."""

import json
import re
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.support.embedded import EVERY_OTHER, run
from tests.support.pages import Page, write_lines
from trainer.analyze.__main__ import main
from trainer.analyze.analysis import write_analysis
from trainer.analyze.tables import analyse, classes_of, kind_of
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


def rows(tables: dict, name: str) -> dict[object, list]:
    return {row[0]: row[1:] for row in tables[name].rows}


def test_tables_of_a_hand_made_example_hold_the_numbers_worked_out_by_hand(tmp_path) -> None:
    tables = analyse(example(tmp_path))
    overview = rows(tables, "overview")
    for name, count in (("completions", 4), ("tokens", 16), ("correct", 1), ("masked spans", 5)):
        assert overview[name] == [count]

    drops = np.array([-0.5, 4.0, 2.0, 6.0, 0.0])
    distribution = rows(tables, "distribution")
    assert distribution["mean"] == [pytest.approx(2.3)]
    assert distribution["standard deviation"] == [pytest.approx(drops.std())]
    z = (drops - drops.mean()) / drops.std()
    assert distribution["skewness"] == [pytest.approx((z**3).mean())]
    assert distribution["excess kurtosis"] == [pytest.approx((z**4).mean() - 3)]
    assert distribution["quantile 0.5"] == [2.0]

    # The 0.9, 0.6 and 0.1 quantiles of the drops that matter, 6, 4 and 2, are 5.6, 4.4 and 2.4.
    counts = {name: row[1] for name, row in rows(tables, "classes").items()}
    assert counts == {"critical": 1, "important": 0, "moderate": 1, "low": 1, "no effect": 1, "distractor": 1}

    thirds = rows(tables, "thirds")  # of 9 tokens before the answer, and of 4
    assert {name: (row[0], pytest.approx(row[1])) for name, row in thirds.items()} == {
        "early": (1, -0.5), "middle": (3, 10 / 3), "late": (1, 2.0),
    }  # fmt: skip
    correctness = rows(tables, "correctness")
    assert {name: row[:2] for name, row in correctness.items()} == {
        "correct": [3, pytest.approx(5.5 / 3)],
        "wrong": [2, 3.0],
    }


def test_concentration_counts_only_completions_that_train(tmp_path) -> None:
    tables = analyse(example(tmp_path))
    row = rows(tables, "concentration")["masking"]
    first, second = [1, 1, 1, 1, 4, 4, 4, 2, 2, 1.5], [1, 3, 0, 1]
    ess = np.mean([sum(w) ** 2 / (len(w) * sum(x * x for x in w)) for w in (first, second)])
    assert row[1] == 2
    assert row[2:] == pytest.approx([26.5 / 14, 0, 1 / 14, 4, 3 / 14, ess, (4 / 21.5 + 3 / 5) / 2])

    # Importances of the first completion are 0 (two tokens), 1 (three), 5/9 (two); of the second 1 and 0.


def test_a_span_is_of_the_first_kind_of_content_that_fits() -> None:
    kinds = {
        "calculation": ["3 * 4 = 12 = 6 + 6", "48/2 = <<48/2=24>>24", "x = 5"],
        "step header": ["Step 2: Calculate the total", "### Rest"],
        "set-up": ["Let x be the price per egg"],
        "conclusion": ["Therefore she has none left"],
        "statement": ["Humans have two legs"],
    }
    assert {kind: [kind_of(text) for text in texts] for kind, texts in kinds.items()} == {
        kind: [kind] * len(texts) for kind, texts in kinds.items()
    }


def test_single_tokens_are_not_judged_by_content_and_units_are_not_mixed(tmp_path) -> None:
    entry = {"tokens": ["a", "b"], "spans": spans((0, 1, 0.5), (1, 2, 1e-5)), "drops_unit": "gradient x input"}
    tables = analyse([*read_samples(write(tmp_path, entry))])
    assert rows(tables, "overview")["unit of drops"] == ["gradient x input"]
    assert rows(tables, "classes")["no effect"][1] == 0  # nothing is rounding in a unit of its own
    assert "kinds" not in tables
    with pytest.raises(ValueError, match="drops must be in one unit, got gradient x input, nats"):
        analyse([*read_samples(write(tmp_path, entry, {**entry, "drops_unit": "nats"}))])


def test_a_reward_of_one_half_is_correct_unless_the_file_says_itself(tmp_path) -> None:
    entries = [{"tokens": [], "reward": reward} for reward in (0.4, 0.5)]
    entries.append({"tokens": [], "reward": 1, "correct": False})
    assert [sample["correct"] for sample in read_samples(write(tmp_path, *entries))] == [False, True, False]


def test_rounding_counts_neither_for_nor_against_a_span() -> None:
    classes, _ = classes_of(np.array([2e-3, 1e-3, 0, -1e-3, -2e-3]), 1e-3)
    assert classes == ["low", *["no effect"] * 3, "distractor"]


def test_a_run_with_signed_credit_is_analysed_end_to_end_by_the_advantages_it_trained_on(tmp_path, capsys) -> None:
    options = ("--estimator=prefix_tree", "--max_steps=1", "--eval_problems=1", "--log_completions=8", EVERY_OTHER)
    folder = run(tmp_path / "run", *options)
    capsys.readouterr()
    start = time.process_time()
    assert main([str(folder)]) == 0
    assert time.process_time() - start < 3
    out = folder / "analysis"
    assert capsys.readouterr().out.split() == [str(out / "analysis.md"), str(out / "page.html")]
    tables = json.loads((out / "analysis.json").read_text("utf-8"))
    overview = dict(tables["overview"]["rows"])
    assert (overview["completions"], overview["unit of drops"]) == (8, "importance by prefix_tree")
    assert [row[0] for row in tables["concentration"]["rows"]] == ["prefix_tree", "prefix_tree, advantages"]
    advantages = [sample["credit"]["prefix_tree, advantages"]["values"] for sample in read_samples(folder)]
    assert any(len(set(row)) > 1 for row in advantages)
    assert "## Drops of masked spans" in (out / "analysis.md").read_text("utf-8")
    page = Page((out / "page.html").read_text("utf-8"))
    logged = Counter(str((sample["tokens"], sample["advantage"])) for sample in read_samples(folder))
    shown = {str((one["tokens"], one["advantage"])): one["times"] for one in page.data["completions"]}
    assert shown == logged


# --- Bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{", "is not JSON"),
        ({}, "is not a completion with its credit .KeyError: 'tokens'"),
        ({"tokens": ["a"], "weights": [1, 2]}, "weights has 2 numbers for 1 tokens"),
        ({"tokens": ["a"], "spans": spans((0, 2, 0.0))}, "span 0 to 2 of 1 tokens"),
        ({"tokens": ["a"], "reward": "good"}, "is not a completion"),
        ({"tokens": ["a"], "correct": "yes"}, "correct is 'yes' and drops_unit 'nats', not true or false and a text"),
        ({"tokens": ["a"], "drops_unit": ["nats"]}, "drops_unit .'nats'., not true or false and a text"),
        ({"tokens": ["a"], "answer": {"start": "0", "end": 1}}, "TypeError: '<=' not supported"),
        ({"tokens": ["a"], "answer": {"start": 0, "end": 2}}, "answer 0 to 2 of 1 tokens"),
        ({"tokens": ["a"], "reward": float("nan")}, "Out of range float values are not JSON compliant"),
    ],
)
def test_a_bad_line_is_named(tmp_path, capsys, entry, message) -> None:
    file = write(tmp_path, {"tokens": ["fine"]}, "", entry)
    assert main([str(file)]) == 1
    assert re.search(f"^error: {re.escape(str(file))}, line 3: .*{message}", capsys.readouterr().err)


def test_an_empty_run_and_a_missing_file_are_named(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"completions\.jsonl: there is no such file"):
        write_analysis(tmp_path)
    write(tmp_path)
    with pytest.raises(ValueError, match="holds no completion"):
        write_analysis(tmp_path)
