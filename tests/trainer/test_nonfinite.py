"""Numbers that are not finite end a run, and nothing of them is ever kept."""

import pytest
import torch

from tests.support.embedded import EVERY_OTHER
from tests.support.runs import config
from tests.support.tiny import TINY_RUN
from trainer.checkpoints import open_run
from trainer.run import set_up, train
from trainer.step import training_step

FAULTS = {
    "reward": r"sample 1 \(dataset .*rows.jsonl, row \d\): reward broken is inf",
    "log-prob": r"samples \[0, 1, 2, 3\]: log-prob is not finite",
    "gradient": r"samples \[0, 1, 2, 3\]: gradient of model.norm.weight is not finite",
    "logits": r"sample 0: the model's logits are not finite from token 0 on \(4 of 4 samples\)",
    "scores": r"completions row \d: the model gave a nan log-prob",
    "weights": r"held-out problem 0: the model's logits are not finite from token 0 on \(2 of 2 samples\)",
}


def damage(trainer, kind: str) -> None:
    policy = trainer.policy
    if kind == "reward":
        trainer.rewards = {"broken": lambda **_: [0, torch.inf, 0, 1]}
    elif kind == "weights":
        trainer.optimizer.register_step_post_hook(lambda *_: trainer.policy.model.norm.weight.data.fill_(torch.inf))
    elif kind == "gradient":
        policy.model.norm.weight.register_hook(lambda gradient: gradient * torch.nan)
    else:
        trains = kind != "logits"  # sampling needs no gradient
        policy.model.layers[1].mlp.register_forward_hook(
            lambda _, __, out: out * torch.nan if torch.is_grad_enabled() == trains else out
        )


@pytest.mark.parametrize("kind", FAULTS)
def test_a_run_ends_with_step_and_cause_and_saves_nothing(tiny_folder, tmp_path, kind, monkeypatch) -> None:
    argv = [
        *TINY_RUN, f"--model={tiny_folder / 'model'}", f"--dataset={tiny_folder / 'rows.jsonl'}", "--no_use_peft",
        "--no_mask_truncated_completions", EVERY_OTHER, f"--output_dir={tmp_path / 'run'}",
        "--estimator=masking" if kind == "scores" else "--credit=none",
    ]  # fmt: skip
    trainer = set_up(config(*argv))
    monkeypatch.setattr("trainer.run.training_step", lambda *step: (damage(trainer, kind), training_step(*step))[1])
    said = rf"^step 1, {FAULTS[kind]}.*; this step is not saved$"
    with pytest.raises(FloatingPointError, match=said), open_run(trainer.config) as folder:
        train(trainer, folder)
    assert not (tmp_path / "run" / "checkpoint").exists()
