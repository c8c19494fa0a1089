"""A run that is asked to end keeps what it has; one whose disk fills loses nothing it had kept."""

import errno
import itertools
import os
import re
import resource
import signal

import pytest

from tests.support.runs import child, flags, main, outcome
from trainer import run
from trainer.disk import DiskError, whole_folder, write_whole
from trainer.endings import Ended, Ending
from trainer.report.report import Silence


def signalled(argv: list[str], number: int, step: int, twice: bool = False) -> tuple[int, str, str]:
    """Run, and send this process a signal in a step; in step 0 in its evaluation, before that while it is set up."""

    def send(_: object = None) -> None:
        for _ in range(1 + twice):
            os.kill(os.getpid(), number)

    if step < 0:
        set_up = run.set_up
        run.set_up = lambda *args: (send(), set_up(*args))[1]
    if step == 0:
        run.evaluate = lambda *_, **__: (send(), os._exit(9))  # it is left at once
    return main(argv, lambda call: send() if call == step else None)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code", "step"), [("SIGINT", 130, 3), ("SIGTERM", 0, 0), ("SIGHUP", 0, 5)])
def test_a_signal_ends_a_run_after_its_step_and_the_same_command_goes_on(there, undisturbed, name, code, step) -> None:
    folder = there / f"{name}{step}"
    argv = flags(there / "model", folder)
    exit_code, (ended, out, said) = child(signalled, argv, getattr(signal, name), step)
    assert (exit_code, ended, said) == (0, code, "")
    assert f"ended by {name} after step {step}; {folder} holds the checkpoint of step {step}: the same command" in out
    assert f"resuming from the checkpoint of step {step}, later ones repeat;" in child(main, argv)[1][1]
    assert outcome(folder) == undisturbed


@pytest.mark.slow
def test_a_signal_before_the_first_step_ends_at_once_and_leaves_nothing(there) -> None:
    argv = flags(there / "model", there / "early")
    _, (ended, _, said) = child(signalled, argv, signal.SIGINT, -1)
    assert (ended, said) == (130, "ended before a step; nothing was written, and what was there is unchanged\n")
    assert not (there / "early").exists()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(there) -> None:
    folder = there / "twice"
    assert child(signalled, flags(there / "model", folder), signal.SIGINT, 3, True) == (130, None)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-0", "step-2"]


class Signalled(Ending):
    """A request whose signal comes as soon as the run does not look at it itself."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "waits" and not value and self.signal:
            raise Ended


def test_a_signal_as_an_evaluation_begins_ends_only_the_evaluation(trainer) -> None:
    ending = Signalled()
    ending.signal = signal.SIGTERM
    assert not run.evaluate_at(trainer, Silence(), 0, ending)
    assert ending.waits


def test_a_signal_that_is_ignored_at_the_start_stays_ignored() -> None:
    """As nohup does with SIGHUP, and a script's shell with SIGINT of what it starts by `&`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Ending() as ending:
            signal.raise_signal(signal.SIGHUP)
        assert ending.signal is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_is_gone_does_not_keep_its_signal_from_ending_the_run() -> None:
    read, gone = os.pipe()
    os.close(read)
    before = [os.dup(one) for one in (1, 2)]
    try:
        for one in (1, 2):
            os.dup2(gone, one)
        with Ending() as ending:
            ending.waits = True
            signal.raise_signal(signal.SIGHUP)
        for one in (1, 2):
            os.write(one, b"to nowhere")
    finally:
        for one, copy in enumerate(before, start=1):
            os.dup2(copy, one)
            os.close(copy)
        os.close(gone)
    assert ending.signal == signal.SIGHUP


def without_space(argv: list[str]) -> list[tuple[int, str, str]]:
    """Run with no space for weights from step 3 on, and again with space; Python ignores the limit's signal."""
    free = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(call: int) -> None:
        if call == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (32 << 10, free[1]))  # bytes; lines of metrics still fit

    ends = [main(argv, fill)]
    resource.setrlimit(resource.RLIMIT_FSIZE, free)
    return [*ends, main(argv)]


@pytest.mark.slow
def test_a_disk_without_space_is_named_and_loses_no_checkpoint(there, undisturbed) -> None:
    folder = there / "full"
    _, (full, whole) = child(without_space, flags(there / "model", folder))
    assert full[0] == 1
    step = folder / "checkpoints/step-4"
    assert re.match(rf"error: step 4: {step} cannot be written: .*(File too large|PytorchStreamWriter)", full[2])
    assert f"; {folder} holds the checkpoint of step 2: the same command with --output_dir={folder} resumes" in full[2]
    assert whole[0] == 0
    assert "resuming from the checkpoint of step 2" in whole[1]
    assert outcome(folder) == undisturbed


def test_wherever_writing_fails_the_old_file_or_folder_is_whole(tmp_path, monkeypatch) -> None:
    calls = itertools.count()

    def fails(at: int):
        def sync(_: int) -> None:
            if next(calls) == at:
                raise OSError(errno.EIO, "Input/output error")

        return sync

    def write(text: str) -> None:
        write_whole(tmp_path / "file", text)
        with whole_folder(tmp_path / "folder") as aside:
            (aside / "one").write_text(text)
            (aside / "two").write_text(text)

    write("old")
    for at in range(6):
        calls = itertools.count()
        monkeypatch.setattr(os, "fsync", fails(at))
        with pytest.raises(DiskError, match=rf"{tmp_path}/f\w+ cannot be written: Input/output error"):
            write("new")
        assert (tmp_path / "file").read_text() in ("old", "new")
        assert {(tmp_path / "folder" / name).read_text() for name in ("one", "two")} in ({"old"}, {"new"})
        assert len(list(tmp_path.iterdir())) <= 3
    monkeypatch.setattr(os, "fsync", lambda _: None)
    write("new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
