"""A run that was killed, at whatever moment, ends by the same command as one that was not."""

import json
import random
import signal
import time

import pytest
import torch

from tests.support.runs import child, config, flags, kill_at, main, outcome, timeless
from trainer.checkpoints import files
from trainer.checkpoints.run_folder import RunFolder, open_run
from trainer.run import set_up, train

pytestmark = pytest.mark.slow
PEFT = ["--use_peft", "--lora_r=2"]
MOMENTS = 74  # of an undisturbed run: 4 checkpoints, 6 rewards, 12 updates, the model and files written whole


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """A folder of runs, all of one model."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def undisturbed(there):
    """The outcome of a run that nothing befell, and the seconds that it took."""
    began = time.monotonic()
    code, (ended, _, said) = child(main, flags(there / "model", there / "undisturbed"))
    assert (code, ended, said) == (0, 0, "")
    return outcome(there / "undisturbed"), time.monotonic() - began


def killed_and_gone_on(argv: list[str], moments: list[int]) -> str:
    for moment in moments:
        assert child(kill_at, moment, argv)[0] == -signal.SIGKILL
    code, (ended, said, _) = child(main, argv)
    assert (code, ended) == (0, 0)
    return said


def moments_of_a_run(argv: list[str]) -> int:
    """Count them by asking for one that does not come."""
    with pytest.raises(AssertionError, match="has only"):
        kill_at(10**9, argv)
    return 0


@pytest.mark.parametrize("seed", range(4))
def test_a_run_killed_at_random_moments_ends_as_the_undisturbed_one(there, undisturbed, seed) -> None:
    folder, moments = there / f"killed{seed}", random.Random(seed).sample(range(1, 30), 2)
    killed_and_gone_on(flags(there / "model", folder), moments)
    assert outcome(folder) == undisturbed[0]


def test_a_run_killed_between_the_two_updates_of_a_step_ends_as_the_undisturbed_one(there, undisturbed) -> None:
    folder = there / "between"

    def weights_change(step: int) -> None:
        if step == 4:
            optimizer_step, taken = torch.optim.AdamW.step, []

            def second(optimizer, *given):
                taken.append(optimizer)
                if len(taken) == 2:
                    raise KeyboardInterrupt  # stands for a kill: nothing catches it
                return optimizer_step(optimizer, *given)

            patch.setattr(torch.optim.AdamW, "step", second)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        main(flags(there / "model", folder), weights_change)
    assert [entry["step"] for entry in timeless(folder)] == [0, 1, 2, 3, 3]  # the last checkpoint is of step 2
    assert "going on from the checkpoint of step 2" in main(flags(there / "model", folder))[1]
    assert outcome(folder) == undisturbed[0]


def test_a_run_killed_after_random_times_ends_as_the_undisturbed_one(there, undisturbed) -> None:
    folder, draw = there / "timed", random.Random(0)
    argv = flags(there / "model", folder)
    for _ in range(3):
        child(main, argv, killed_after=draw.random() * undisturbed[1])
    code, (ended, _, _) = child(main, argv)
    assert (code, ended) == (0, 0)
    assert outcome(folder) == undisturbed[0]


def test_a_lora_run_goes_on_from_its_adapter(there) -> None:
    one, other = (flags(there / "model", there / name, *PEFT) for name in ("adapter", "adapter-killed"))
    assert main(one)[0] == 0
    killed_and_gone_on(other, [20])
    trained = "adapter/adapter_model.safetensors"
    assert outcome(there / "adapter-killed", trained) == outcome(there / "adapter", trained)
    weights = (there / "adapter/checkpoints/step-6/weights.safetensors").stat().st_size
    assert weights < (there / "undisturbed/checkpoints/step-6/weights.safetensors").stat().st_size / 2


def test_a_steady_schedule_lets_a_finished_run_go_on_for_longer(there, capsys) -> None:
    steady = ["--lr_scheduler_type=constant", "--max_steps=4"]
    folder, whole = there / "longer", there / "whole"
    assert main(flags(there / "model", folder, *steady))[0] == 0
    assert main(flags(there / "model", folder, *steady, "--max_steps=6"))[0] == 0
    assert main(flags(there / "model", whole, *steady, "--max_steps=6"))[0] == 0
    ours, theirs = outcome(folder), outcome(whole)
    assert ours["weights"] == theirs["weights"]
    assert [entry for entry in ours["metrics"] if entry not in theirs["metrics"]] == [
        entry for entry in ours["metrics"] if entry["step"] == 4 and "eval_accuracy" in entry
    ]
    code, _, said = main(flags(there / "model", folder, *steady))
    assert (code, said) == (0, "")
    (folder / "summary.json").unlink()
    assert main(flags(there / "model", folder, *steady))[2].startswith(f"error: max_steps: {folder} is at step 6")


def test_weights_that_never_had_a_gradient_go_on_without_a_state_of_the_optimizer(there) -> None:
    def trainer(name: str):
        made = set_up(config(*flags(there / "model", there / name, "--max_steps=1")))
        norm = made.policy.model.norm.weight
        made.optimizer.register_step_pre_hook(lambda *_: setattr(norm, "grad", None))
        return made, norm

    one, norm = trainer("routed")
    train(one)
    assert norm not in one.optimizer.state
    again, norm = trainer("routed")
    assert RunFolder(there / "routed").begin(again)[0] == 1
    assert norm not in again.optimizer.state
    assert len(again.optimizer.state) == len(one.optimizer.state) > 0
    assert again.optimizer.param_groups[0]["betas"] == one.optimizer.param_groups[0]["betas"]


@pytest.fixture(scope="module")
def stopped(there):
    """A trainer, and a run of its settings that was stopped after step 5: checkpoints of steps 2 and 4."""
    argv = flags(there / "model", there / "stopped")
    child(kill_at, 30, argv)
    return set_up(config(*argv)), there / "stopped"


def checkpoints(folder) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def faults():
    def flip(path, draw):
        content, place = bytearray(path.read_bytes()), draw.randrange(path.stat().st_size)
        content[place] ^= 1 << draw.randrange(8)
        path.write_bytes(content)

    def truncate(path, draw):
        path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])

    def remove(path, _):
        path.unlink()

    return {"flipped": flip, "truncated": truncate, "missing": remove}


@pytest.mark.parametrize("fault", faults())
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_used(stopped, fault) -> None:
    trainer, folder = stopped
    before, last = (int(name.removeprefix("step-")) for name in checkpoints(folder))
    kept = folder / "checkpoints" / f"step-{last}"
    names = sorted(path.name for path in kept.iterdir())
    assert names == ["manifest.json", "optimizer.safetensors", "state.json", "weights.safetensors"]
    for seed, name in enumerate(names * 3):
        content = (kept / name).read_bytes()
        faults()[fault](kept / name, random.Random(seed))
        if (kept / name).exists() and fault == "flipped" and is_same_manifest(kept / name, content):
            (kept / name).write_bytes(content)
            continue
        run = RunFolder(folder)
        step, _ = run.begin(trainer)
        (kept / name).write_bytes(content)
        assert step == before
        (note,) = run.notes
        assert f"the checkpoint of step {last} is damaged and was left out: {kept}" in note
        assert name == "manifest.json" or str(kept / name) in note
    run = RunFolder(folder)
    assert (run.begin(trainer)[0], run.notes) == (last, [])


def is_same_manifest(path, content: bytes) -> bool:
    """Whether a flipped bit changed only blanks of the manifest."""
    try:
        return path.name == "manifest.json" and json.loads(path.read_bytes()) == json.loads(content)
    except ValueError:
        return False


def test_without_a_good_checkpoint_a_run_is_not_begun_again_over_its_files(stopped, tmp_path) -> None:
    trainer, folder = stopped
    weights = [path / "weights.safetensors" for path in (folder / "checkpoints").iterdir()]
    contents = [path.read_bytes() for path in weights]
    metrics = (folder / "metrics.jsonl").read_bytes()
    for path in weights:
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"no checkpoint to go on from; .*step 4 .*; .*step 2 .*; --no_resume"):
        RunFolder(folder).begin(trainer)
    for path, content in zip(weights, contents, strict=True):
        path.write_bytes(content)
    (folder / "metrics.jsonl").write_bytes(metrics[:100])
    with pytest.raises(ValueError, match=r"metrics.jsonl is shorter than the \d+ bytes that it had at step 4"):
        RunFolder(folder).begin(trainer)
    (folder / "metrics.jsonl").write_bytes(metrics)


def test_other_problems_under_the_same_settings_are_refused(stopped) -> None:
    trainer, folder = stopped
    first = trainer.rows[0]
    trainer.rows[0] = first | {"answer": "#### 12345"}
    with pytest.raises(ValueError, match="SHA-256 of the training problems was .* and is .* now; --no_resume"):
        RunFolder(folder).begin(trainer)
    trainer.rows[0] = first


def test_a_clock_that_jumps_changes_neither_the_choice_of_a_checkpoint_nor_the_run(
    there, undisturbed, monkeypatch
) -> None:
    hours = random.Random(0)
    monkeypatch.setattr(time, "time", lambda: 1e9 + 1e8 * hours.uniform(-1, 1))
    folder = there / "jumping"
    argv = flags(there / "model", folder)

    def stop(call: int) -> None:
        if call == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        main(argv, stop)
    for age, path in enumerate(sorted((folder / "checkpoints").iterdir(), reverse=True)):
        files.os.utime(path, (1e9 + age, 1e9 + age))  # the last one is the oldest by its date
    assert "going on from the checkpoint of step 4" in main(argv)[1]
    assert outcome(folder) == undisturbed[0]


def test_what_a_killed_process_left_half_written_is_deleted(there, undisturbed) -> None:
    folder = there / "leftovers"
    argv = flags(there / "model", folder, "--max_steps=2", "--lr_scheduler_type=constant")
    (folder / "checkpoints" / ".step-1.partial").mkdir(parents=True)
    with open_run(config(*argv)):
        pass
    assert main(argv)[0] == 0
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-0", "step-2"]
    assert not list(folder.glob(".*.partial"))
