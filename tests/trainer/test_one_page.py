"""The method on one page runs as it says, and learns."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trainer import one_page
from trainer.one_page import Settings, load, main, number, reward

pytestmark = [pytest.mark.slow, pytest.mark.traced]  # a run on the host, with or without a GPU elsewhere

SHORT = Settings(steps=2, prompts_per_step=4, group=4, held_out=8, max_tokens=60)


def test_it_fits_on_its_page():
    assert len(Path(one_page.__file__).read_text("utf-8").splitlines()) <= 200


@pytest.mark.parametrize("credit", [True, False])
def test_a_short_run_trains_and_says_how_it_went(credit, monkeypatch, capsys):
    losses = []
    step = one_page.training_step
    monkeypatch.setattr(one_page, "training_step", lambda *args: losses.append(step(*args)) or losses[-1])
    accuracies = main(replace(SHORT, credit=credit))
    assert len(accuracies) == 2
    assert all(0 <= accuracy <= 1 for accuracy in accuracies)
    assert len(losses) == SHORT.steps
    assert any(loss for _, loss in losses)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == SHORT.steps + 2
    assert lines[0].endswith("% of 8 held-out problems")


def test_credit_changes_the_first_loss_and_a_seed_repeats_it(monkeypatch):
    def first_loss(settings):
        losses = []
        step = one_page.training_step
        with monkeypatch.context() as patch:
            patch.setattr(one_page, "training_step", lambda *args: losses.append(step(*args)) or losses[-1])
            main(replace(settings, steps=1))
        return losses[0][1]

    plain = first_loss(replace(SHORT, credit=False))
    assert plain == first_loss(replace(SHORT, credit=False)) != first_loss(SHORT)


def test_problems_of_a_file_are_asked_and_answered(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHORT.model)
    path = tmp_path / "problems.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "That is 2.\\n#### 2"}\n' * 3, "utf-8")
    train, held_out = load(replace(SHORT, problems=str(path), held_out=1), tokenizer)
    assert (len(train), len(held_out)) == (2, 1)
    assert train[0].answer == "2"
    right = tokenizer("So it is 2.\n#### 2", return_tensors="pt")["input_ids"][0]
    assert reward(right, train[0], tokenizer) == 1.0
    assert reward(torch.cat([right, right[-1:]]), train[0], tokenizer) == 0.0
    assert number(" $1,234.") == number("1234.0") == "1234"
    assert number("1,2,3") == "1,2,3"
