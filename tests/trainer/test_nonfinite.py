"""Numbers that are not finite end a run, and nothing of them is ever kept."""

import pytest
import torch

from tests.support.embedded import EVERY_OTHER
from tests.support.tiny import TINY_RUN
from trainer.cli import parse
from trainer.config import TrainConfig
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


@pytest.mark.parametrize("kind", FAULTS)
def test_a_run_ends_with_step_and_cause_and_saves_nothing(tiny, tmp_path, kind) -> None:
    trainer = tiny("--credit=counterfactual" if kind == "scores" else "--credit=uniform")
    fault = Fault(trainer, kind)
    sampling(trainer, lambda step: setattr(fault, "now", step > 0))
    with pytest.raises(FloatingPointError, match=rf"^step 1, {FAULTS[kind]}.*; this step is not saved$"):
        train(trainer)
    assert not (tmp_path / "run" / "checkpoint").exists()
