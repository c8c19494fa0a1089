"""The method on one page runs as it says, and learns."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from trainer import one_page
from trainer.one_page import Settings, main

pytestmark = [pytest.mark.slow, pytest.mark.traced]  # a run on the host, with or without a GPU elsewhere

SHORT = Settings(max_steps=2, generation_batch_size=16, num_generations=4, eval_problems=8, max_completion_length=60)


def test_it_fits_on_its_page_and_no_module_needs_it():
    modules = [path for folder in ("trainer", "benchmarks") for path in (REPOSITORY / folder).rglob("*.py")]
    assert not [path for path in modules if "one_page" in path.read_text("utf-8") and path.name != "one_page.py"]
    assert len(Path(one_page.__file__).read_text("utf-8").splitlines()) <= 150


def test_a_short_run_trains_says_how_it_went_and_repeats_and_credit_changes_its_loss(monkeypatch, capsys):
    losses, step = [], one_page.training_step
    monkeypatch.setattr(one_page, "training_step", lambda *args: losses.append(step(*args)) or losses[-1])
    accuracies = main(replace(SHORT, credit="none"))
    assert len(accuracies) == 2
    assert all(0 <= accuracy <= 1 for accuracy in accuracies)
    assert len(losses) == SHORT.max_steps
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == SHORT.max_steps + 2
    assert lines[0].endswith("% of 8 problems")
    monkeypatch.setattr(one_page, "evaluate", lambda *_: 0.0)  # which draws nothing
    for credit in ("none", "cf"):
        main(replace(SHORT, credit=credit, max_steps=1))
    (_, first), _, (_, again), (_, credited) = losses
    assert first == again != credited
    assert any(loss for _, loss in losses)
