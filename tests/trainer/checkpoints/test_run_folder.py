"""Which folder a run takes: a new one, its own, never another's."""

import datetime
import shutil
import time
from pathlib import Path

import pytest
import yaml

from tests.support.runs import config, flags, main
from trainer import checkpoints
from trainer.checkpoints import Finished, Refused, RunFolder, open_run


@pytest.fixture
def argv(tmp_path):
    """Flags of a run in a folder of its own, or by `None` in one under runs/."""
    (tmp_path / "model").mkdir()

    def of(name: str | None = "run", *more: str) -> list[str]:
        return flags(tmp_path / "model", None if name is None else tmp_path / name, *more)

    return of


def begun(argv: list[str], steps: int = 3, finished: bool = False):
    """Leave a folder as a run of these settings that took so many steps would."""
    with open_run(config(*argv)) as folder:
        checkpoints.write_whole(folder.path / "config.yaml", checkpoints.to_yaml(config(*argv), "a test"))
        (folder.path / "checkpoints" / f"step-{steps}").mkdir(parents=True)
        (folder.path / "metrics.jsonl").write_text(
            "".join(f'{{"step": {step}, "x": 1}}\n' for step in range(steps + 1))
        )
        if finished:
            (folder.path / "summary.json").write_text("{}")
    return folder.path


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--learning_rate=2e-3"], r"learning_rate \(0.001 then, 0.002 now\)"),
        (["--seed=1", "--spans.max_spans=5"], r"seed \(0 then, 1 now\), credit_options \(.*\)"),
        (["--max_steps=8"], r"max_steps \(6 then, 8 now\)"),
        (["--reward_funcs", "exact_match"], r"reward_funcs \(\[.*\] then, \['exact_match'\] now\)"),
    ],
)
def test_a_changed_setting_is_refused_and_the_difference_shown(argv, more, said) -> None:
    path = begun(argv())
    with pytest.raises(Refused, match=rf"{path} was begun with other settings: .*{said}.*--no_resume starts again"):
        open_run(config(*argv("run", *more))).__enter__()


def test_under_a_steady_schedule_a_run_may_become_longer(argv) -> None:
    path = begun(argv("run", "--lr_scheduler_type=constant"), steps=6, finished=True)
    with pytest.raises(Finished, match="run is finished; --no_resume"):
        open_run(config(*argv("run", "--lr_scheduler_type=constant"))).__enter__()
    with open_run(config(*argv("run", "--lr_scheduler_type=constant", "--max_steps=8"))) as folder:
        assert folder.path == path
    shutil.rmtree(path / "checkpoints")
    with pytest.raises(Finished, match="run is finished; --no_resume"):
        open_run(config(*argv("run", "--lr_scheduler_type=constant"))).__enter__()


def test_a_setting_that_a_run_did_not_know_had_its_default_and_how_often_it_saves_and_logs_may_change(argv) -> None:
    path = begun(argv())
    settings = yaml.safe_load((path / "config.yaml").read_text())
    del settings["beta"]
    (path / "config.yaml").write_text(yaml.safe_dump(settings))
    may_change = ["--save_steps=5", "--eval_steps=2", "--log_completions=0", "--device=auto", "--report_to", "wandb"]
    with open_run(config(*argv("run", *may_change))) as folder:
        assert folder.path == path
    with pytest.raises(Refused, match=r"beta \(0.0 then, 0.5 now\)"):
        open_run(config(*argv("run", "--beta=0.5"))).__enter__()


def test_to_start_anew_takes_a_new_folder(argv, tmp_path) -> None:
    begun(argv(), steps=0)
    for name in ("run-2", "run-3"):
        assert begun(argv("run", "--no_resume", "--seed=4")) == tmp_path / name
    assert begun(argv("another", "--no_resume")) == tmp_path / "another"


def test_without_an_output_dir_a_run_begins_and_says_how_to_resume(argv, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    first, other = begun(argv(None)), begun(argv(None))
    assert (first.parent, first.name[:15], other.name) == (Path("runs"), "20260101-000000", f"{first.name}-2")
    said = RunFolder(other, datetime.datetime.now()).how_to_go_on(config(*argv(None)))
    assert said.endswith(f"step 3: the same command with --output_dir={other} resumes from there")
    with open_run(config(*argv(None), f"--output_dir={other}")) as folder:
        assert folder.path == other


def test_a_second_run_in_a_folder_is_refused_while_the_first_one_lives(argv, tmp_path) -> None:
    with open_run(config(*argv())):
        code, _, said = main(argv())
        assert (code, said) == (
            1,
            f"error: output_dir: another run is writing to {tmp_path / 'run'}; name another folder\n",
        )
    with open_run(config(*argv())):
        pass


def test_a_folder_that_holds_something_else_is_left_alone_and_one_that_cannot_be_made_is_named(argv, tmp_path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("")
    for more in ([], ["--no_resume"]):
        with pytest.raises(Refused, match="run is not empty and holds no run; name another folder or remove it"):
            open_run(config(*argv("run", *more))).__enter__()
    with pytest.raises(NotADirectoryError, match=r"/dev/null/run"):
        open_run(config(*argv(), "--output_dir=/dev/null/run")).__enter__()


@pytest.mark.slow
def test_a_log_that_has_become_shorter_is_named_and_not_filled_up(tmp_path) -> None:
    steady = flags(tmp_path / "tiny", tmp_path / "run", "--lr_scheduler_type=constant", "--save_steps=1")
    code, _, said = main([*steady, "--max_steps=1"])
    assert code == 0, said
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    code, _, said = main([*steady, "--max_steps=2"])
    assert (code, "metrics.jsonl is shorter than it was at step 1" in said) == (1, True)
