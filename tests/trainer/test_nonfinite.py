"""Numbers that are not finite: a run ends over them, or skips the step, and nothing of them is ever kept."""

import copy
import json
import re

import pytest
import torch
from safetensors.torch import load_file

from tests.support.embedded import EVERY_OTHER
from tests.support.tiny import TINY_RUN
from trainer.cli import parse
from trainer.config import TrainConfig
from trainer.nonfinite import attempted_step
from trainer.report.metrics import SKIPPED
from trainer.run import set_up, train

FAULTS = {
    "reward": r"sample 1 \(dataset .*rows.jsonl, row \d\): reward broken is inf",
    "log-prob": r"samples \[0, 1, 2, 3\]: log-prob is not finite",
    "gradient": r"samples \[0, 1, 2, 3\]: gradient of model.norm.weight is not finite",
    "logits": r"sample 0, sample 1, sample 2, sample 3 \(4 of 4\): the model's logits are not finite",
    "scores": r"completions row \d: the model gave a nan log-prob",
}


class Fault:
    """Breaks one kind of number of a trainer for as long as `now`."""

    def __init__(self, trainer, kind: str, uses: int = 0) -> None:
        """`uses` is how often the number is right before it breaks."""
        self.now, self.uses = False, uses
        policy = trainer.policy
        if kind == "reward":
            right = trainer.rewards["reward_every_other"]
            trainer.rewards = {
                "broken": lambda **given: [*right(**given)[:1], torch.inf, 0, 1] if self() else right(**given)
            }
        elif kind == "gradient":
            policy.model.norm.weight.register_hook(lambda gradient: gradient * torch.nan if self() else gradient)
        else:
            sampling = kind == "logits"  # the one that needs no gradient
            policy.model.layers[1].mlp.register_forward_hook(
                lambda *given: given[2] * torch.nan if torch.is_grad_enabled() != sampling and self() else given[2]
            )

    def __call__(self) -> bool:
        self.uses -= self.now
        return self.now and self.uses < 0


@pytest.fixture(autouse=True)
def no_curves(monkeypatch) -> None:
    """Drawing takes longer than all else."""
    monkeypatch.setattr("trainer.report.run_report.draw_curves", lambda *_: None)


@pytest.fixture
def tiny(tiny_folder, tmp_path):
    """Sets the tiny model up to train all its weights."""

    def made(*argv: str):
        files = [f"--model={tiny_folder / 'model'}", f"--dataset={tiny_folder / 'rows.jsonl'}"]
        flags = ["--no_use_peft", "--learning_rate=1e-2", "--no_mask_truncated_completions", EVERY_OTHER]
        given = [*TINY_RUN, *files, *flags, f"--output_dir={tmp_path / 'run'}", *argv]
        return set_up(parse(TrainConfig, given, prog="", description=""))

    return made


def sampling(trainer, then) -> None:
    """Calls `then` with the number of the step, 0 in evaluation, whenever the trainer samples."""
    engine = trainer.engine

    class Announced:
        notes, weights_changed = engine.notes, staticmethod(engine.weights_changed)

        def __call__(self, *given, keys=None, **options):
            then(keys[0][1] if keys else 0)
            return engine(*given, keys=keys, **options)

    trainer.engine = Announced()


def kept(trainer) -> list[torch.Tensor]:
    """All that training carries on: weights and the optimizer's state."""
    state = trainer.optimizer.state_dict()["state"].values()
    return [*trainer.policy.parameters(), *(x for of_one in state for x in of_one.values())]


def equal(one, other) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", FAULTS)
def test_a_step_that_is_skipped_changes_no_weight_and_no_state_and_the_next_one_trains(tiny, kind) -> None:
    trainer = tiny("--on_nonfinite=skip", "--credit=counterfactual" if kind == "scores" else "--credit=uniform")
    fault = Fault(trainer, kind)
    assert attempted_step(trainer, 1, [0, 1]).metrics[SKIPPED] == 0
    before = copy.deepcopy(kept(trainer))
    fault.now = True
    step = attempted_step(trainer, 2, [2, 3])
    assert re.match(FAULTS[kind], step.skipped)
    assert step.metrics[SKIPPED] == 1
    assert all(torch.isfinite(torch.tensor(value)) for value in step.metrics.values())
    assert len(step.rollouts.texts) == 4
    assert equal(kept(trainer), before)
    assert all(p.grad is None for p in trainer.policy.parameters())
    fault.now = False
    after = attempted_step(trainer, 3, [4, 5])
    assert after.metrics[SKIPPED] == 0
    assert after.skipped is None
    assert not equal(kept(trainer), before)
    assert all(x.isfinite().all() for x in kept(trainer))


def test_the_finite_steps_that_a_batch_took_before_stay(tiny) -> None:
    once, twice = tiny("--credit=uniform"), tiny("--credit=uniform", "--num_iterations=2", "--on_nonfinite=skip")
    attempted_step(once, 1, [0, 1])
    fault = Fault(twice, "gradient", uses=1)
    fault.now = True
    assert "gradient of model.norm.weight" in attempted_step(twice, 1, [0, 1]).skipped
    assert equal(kept(once), kept(twice))


@pytest.mark.parametrize("kind", ["reward", "logits"])
def test_a_run_logs_what_it_skipped_counts_it_and_saves_what_is_finite(tiny, tmp_path, capsys, kind) -> None:
    trainer = tiny("--on_nonfinite=skip", "--max_steps=3", "--log_completions=4")
    fault = Fault(trainer, kind)
    expected = {"reward": [0, 1, 1], "logits": [1, 0, 0]}[kind]
    sampling(trainer, lambda step: setattr(fault, "now", step > 0 and expected[step - 1] == 1))
    folder = train(trainer)

    def strict(name: str) -> None:
        pytest.fail(f"{name} in a file of JSON")

    metrics, samples = (
        [json.loads(line, parse_constant=strict) for line in (folder / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "completions.jsonl")
    )
    assert [entry[SKIPPED] for entry in metrics if SKIPPED in entry] == expected
    for sample in samples:
        assert (sample["reward"] is None) == ("skipped" in sample) == bool(expected[sample["step"] - 1])
        assert re.match(FAULTS[kind], sample.get("skipped", "")) or not expected[sample["step"] - 1]
        assert "completion" in sample
    assert json.loads((folder / "summary.json").read_text())["skipped_steps"] == sum(expected)
    assert all(x.isfinite().all() for x in load_file(folder / "checkpoint" / "model.safetensors").values())
    printed = capsys.readouterr().out
    assert printed.count("skipped, nothing is learnt from it") == sum(expected)
    assert "was not written" not in printed


def test_a_run_whose_weights_are_not_finite_is_not_skipped_to_its_end(tiny, tmp_path) -> None:
    trainer = tiny("--on_nonfinite=skip", "--max_steps=9")
    trainer.optimizer.register_step_post_hook(lambda *_: trainer.policy.model.norm.weight.data.fill_(torch.inf))
    with pytest.raises(FloatingPointError, match=r"^step 2, model: parameter model.norm.weight is not finite"):
        train(trainer)
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_log_probs_of_another_policy_are_never_skipped(tiny) -> None:
    trainer = tiny("--on_nonfinite=skip", "--max_sampling_gap=1e-30")
    with pytest.raises(FloatingPointError, match="not those they were sampled with"):
        attempted_step(trainer, 1, [0, 1])


@pytest.mark.parametrize("kind", FAULTS)
def test_otherwise_the_run_ends_with_step_and_cause_and_saves_nothing(tiny, tmp_path, kind) -> None:
    trainer = tiny("--credit=counterfactual" if kind == "scores" else "--credit=uniform")
    fault = Fault(trainer, kind)
    sampling(trainer, lambda step: setattr(fault, "now", step > 0))
    with pytest.raises(FloatingPointError, match=rf"^step 1, {FAULTS[kind]}.*; this step is not saved$"):
        train(trainer)
    assert not (tmp_path / "run" / "checkpoint").exists()
