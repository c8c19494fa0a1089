"""Logging back-ends of a run that goes on: the same run there, from the step of the checkpoint on."""

import sys
from types import SimpleNamespace

import pytest

from tests.support.embedded import metrics_of, run
from trainer.report import open_tracker


@pytest.mark.parametrize(
    ("name", "step", "expected"),
    [
        ("wandb", None, {"id": "a1", "resume": "never"}),
        ("wandb", 4, {"id": "a1", "resume": "allow"}),
        ("trackio", None, {"resume": "never"}),
        ("trackio", 4, {"resume": "allow"}),
    ],
)
def test_a_run_that_goes_on_is_the_same_run_for_the_back_end(monkeypatch, tmp_path, name, step, expected) -> None:
    begun = []
    library = SimpleNamespace(init=lambda **options: begun.append(options), log=None, finish=None)
    monkeypatch.setitem(sys.modules, name, library)
    open_tracker(name, tmp_path, {}, "a1", step)
    (options,) = begun
    assert {key: options[key] for key in ("id", "resume") if key in options} == expected


def test_tensorboard_forgets_the_steps_after_the_checkpoint(monkeypatch, tmp_path) -> None:
    begun = []
    library = SimpleNamespace(
        SummaryWriter=lambda folder, purge_step: begun.append(purge_step) or SimpleNamespace(close=0)
    )
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", library)
    for step in (None, 4):
        open_tracker("tensorboard", tmp_path, {}, "a1", step)
    assert begun == [None, 5]


def test_a_back_end_that_fails_ends_no_run(monkeypatch, tmp_path, capsys) -> None:
    steps = []

    def log(metrics, step):
        steps.append(step)
        if step == 1:
            raise ConnectionError("no answer")

    def finish():
        raise TimeoutError("still no answer")

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=lambda **_: None, log=log, finish=finish))
    folder = run(tmp_path / "run", "--report_to", "trackio", "--max_completion_length=12", "--eval_problems=2")
    assert [entry["step"] for entry in metrics_of(folder)] == [0, 1, 2, 2]
    assert steps == [0, 1]
    said = capsys.readouterr().out
    assert "report_to: trackio failed and gets no more: ConnectionError: no answer" in said
    assert "report_to: trackio failed and gets no more: TimeoutError: still no answer" in said
