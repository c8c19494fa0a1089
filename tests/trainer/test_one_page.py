"""The method on one page runs as it says, and learns."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cfa_kernels import Rows
from tests.conftest import REPOSITORY
from trainer import one_page
from trainer.one_page import Settings, load, main, solved

pytestmark = [pytest.mark.slow, pytest.mark.traced]  # a run on the host, with or without a GPU elsewhere

SHORT = Settings(max_steps=2, generation_batch_size=16, num_generations=4, eval_problems=8, max_completion_length=60)


def test_it_fits_on_its_page_and_no_module_needs_it():
    modules = [path for folder in ("trainer", "benchmarks") for path in (REPOSITORY / folder).rglob("*.py")]
    assert not [path for path in modules if "one_page" in path.read_text("utf-8") and path.name != "one_page.py"]
    assert len(Path(one_page.__file__).read_text("utf-8").splitlines()) <= 150


def test_a_short_run_trains_says_how_it_went_and_repeats_and_credit_changes_its_loss(monkeypatch, capsys):
    losses, step = [], one_page.training_step
    monkeypatch.setattr(one_page, "training_step", lambda *args: losses.append(step(*args)) or losses[-1])
    accuracies = main(replace(SHORT, credit="uniform"))
    assert len(accuracies) == 2
    assert all(0 <= accuracy <= 1 for accuracy in accuracies)
    assert len(losses) == SHORT.max_steps
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == SHORT.max_steps + 2
    assert lines[0].endswith("% of 8 problems")
    monkeypatch.setattr(one_page, "evaluate", lambda *_: 0.0)  # which draws nothing
    for credit in ("uniform", "counterfactual"):
        main(replace(SHORT, credit=credit, max_steps=1))
    (_, first), _, (_, again), (_, credited) = losses
    assert first == again != credited
    assert any(loss for _, loss in losses)


def test_problems_of_a_file_are_asked_and_answered(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHORT.model)
    path = tmp_path / "problems.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "That is 2.\\n#### 2"}\n' * 3, "utf-8")
    train, held_out = load(replace(SHORT, dataset=str(path), eval_problems=1), tokenizer)
    assert (len(train), len(held_out)) == (2, 1)
    right = tokenizer("So it is 2.\n#### 2", return_tensors="pt")["input_ids"][0]
    rows = Rows([torch.tensor(problem.prompt) for problem in train], [right, torch.cat([right, right[-1:]])])
    assert solved(rows, train, tokenizer) == [1.0, 0.0]


@pytest.mark.parametrize(
    "ends", [lambda eos, newline: newline, lambda eos, newline: [eos, newline], lambda eos, _: eos]
)
def test_a_completion_ends_with_the_first_of_the_models_ends_and_keeps_no_padding(ends):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHORT.model)
    model = AutoModelForCausalLM.from_pretrained(SHORT.model).eval()
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"][-1]  # plays the end of a turn
    model.generation_config.eos_token_id = ends(tokenizer.eos_token_id, newline)
    known = {tokenizer.eos_token_id} | ({newline} if ends(0, 1) != 0 else set())
    _, held_out = load(replace(SHORT, eval_problems=6), tokenizer)
    torch.manual_seed(0)
    for greedy in (False, True):
        rows = one_page.sample(model, tokenizer, held_out, SHORT, greedy=greedy)
        for row in rows.completions:
            assert not known & {*row[:-1].tolist()}
            assert int(row[-1]) in known or len(row) == SHORT.max_completion_length
        assert len({len(row) for row in rows.completions}) > 1
