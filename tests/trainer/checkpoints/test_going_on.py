"""A run that was killed, at whatever moment, ends by the same command as one that was not."""

import datetime
import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.runs import child, config, flags, kill_at, main, outcome
from trainer.checkpoints import Refused, RunFolder, open_run
from trainer.run import set_up, train

pytestmark = [pytest.mark.slow, pytest.mark.traced]
PEFT = ["--use_peft", "--dtype=float32", "--lora_r=2", "--max_steps=4"]


def killed_and_gone_on(argv: list[str], moments: list[int], of: str = "") -> str:
    """Kill a run at each of these moments after its last start, then let it end; gives what it says then."""
    for moment in moments:
        assert child(kill_at, moment, argv, of)[0] == -signal.SIGKILL
    code, (ended, said, _) = child(main, argv)
    assert (code, ended) == (0, 0)
    return said


def test_a_run_killed_at_random_moments_ends_as_the_undisturbed_one(there, undisturbed) -> None:
    folder, moments = there / "killed", random.Random(0).sample(range(1, 40), 4)
    killed_and_gone_on(flags(there / "model", folder), moments)
    assert outcome(folder) == undisturbed


def test_a_run_killed_between_the_two_updates_of_a_step_ends_as_the_undisturbed_one(there, undisturbed) -> None:
    folder = there / "between"
    said = killed_and_gone_on(flags(there / "model", folder), [8], "update")
    assert "resuming from the checkpoint of step 2, later ones repeat; --no_resume" in said
    assert outcome(folder) == undisturbed


def test_a_lora_run_goes_on_from_its_adapter(there) -> None:
    one, other = (flags(there / "model", there / name, *PEFT) for name in ("adapter", "adapter-killed"))
    assert child(main, one)[0] == 0
    killed_and_gone_on(other, [14])
    trained = "adapter/adapter_model.safetensors"
    assert outcome(there / "adapter-killed", trained) == outcome(there / "adapter", trained)
    size = (there / "adapter/checkpoints/step-4/state.pt").stat().st_size
    assert size < (there / "undisturbed/checkpoints/step-6/state.pt").stat().st_size / 2


def run_in(path: Path) -> RunFolder:
    return RunFolder(path, datetime.datetime.now())


def without_a_gradient(argv: list[str]) -> list[tuple[int, bool, list[float]]]:
    """Train one step in which a weight has no gradient, and set up again from its checkpoint."""
    states = []
    for _ in range(2):
        trainer = set_up(config(*argv))
        norm, optimizer = trainer.policy.model.norm.weight, trainer.optimizer
        if states:
            run_in(Path(trainer.config.output_dir)).begin(trainer)
        else:
            optimizer.register_step_pre_hook(lambda *_, norm=norm: setattr(norm, "grad", None))
            with open_run(trainer.config) as folder:
                train(trainer, folder)
        states.append((len(optimizer.state), norm in optimizer.state, optimizer.param_groups[0]["betas"]))
    return states


def test_weights_that_never_had_a_gradient_go_on_without_a_state_of_the_optimizer(there) -> None:
    _, (one, again) = child(without_a_gradient, flags(there / "model", there / "routed", "--max_steps=1"))
    assert one == again
    assert one[0] > 0
    assert not one[1]


@pytest.fixture(scope="module")
def stopped(there):
    """A trainer, and a run of its settings that was killed in step 6: checkpoints of steps 2 and 4."""
    argv = flags(there / "model", there / "stopped")
    assert child(kill_at, 6, argv, "reward")[0] == -signal.SIGKILL
    return set_up(config(*argv)), there / "stopped"


def test_a_checkpoint_that_cannot_be_read_is_named_and_without_it_the_one_before_is_used(stopped, tmp_path) -> None:
    trainer, folder = stopped
    folder = shutil.copytree(folder, tmp_path / "run")
    _, last = (folder / "checkpoints" / name for name in ("step-2", "step-4"))
    damaged = (
        (last / "state.pt", b"PK"), (last / "run.json", b"{"), (last / "run.json", b"{}"), (last / "run.json", b"[]"),
    )  # fmt: skip
    for file, content in damaged:
        whole = file.read_bytes()
        file.write_bytes(content)
        with pytest.raises(Refused, match=f"(?s){last} cannot be read .*; remove it to resume from the one before"):
            run_in(folder).begin(trainer)
        file.write_bytes(whole)
    (folder / "summary.json").write_text("{}")  # of a run that had fewer steps
    assert run_in(folder).begin(trainer)[0] == 4
    assert not (folder / "summary.json").exists()
    shutil.rmtree(last)
    assert run_in(folder).begin(trainer)[0] == 2


def test_another_model_and_other_problems_or_prompts_are_refused(stopped, there, tmp_path) -> None:
    trainer, folder = stopped
    for part in ("rows", "held_out_prompts"):
        changed = replace(trainer, **{part: getattr(trainer, part)[1:]})
        with pytest.raises(Refused, match="was begun with other base weights, problems, prompts or device"):
            run_in(folder).begin(changed)
    trainer, run = set_up(config(*flags(there / "model", tmp_path, *PEFT))), run_in(tmp_path / "peft")
    run.path.mkdir()
    run.started = datetime.datetime(2026, 11, 26)
    assert run.begin(trainer) == (0, {})
    run.save(trainer, 0, lambda: {"bytes": {}})
    assert run.begin(trainer) == (0, {"bytes": {}})
    with open_run(replace(trainer.config, output_dir=str(run.path))) as again:  # which keeps the date of its prompts
        assert again.started == run.started
    with torch.no_grad():
        next(p for p in trainer.policy.parameters() if not p.requires_grad).mul_(1.01)
    with pytest.raises(Refused, match="was begun with other base weights"):
        run.begin(trainer)
