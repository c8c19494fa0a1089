"""Stage times: those of the host, those of a device that runs behind it, and what a person sees of them."""

import contextlib
import time

import pytest
import torch

from trainer.metrics import STAGES, StageTimes

pytestmark = pytest.mark.slow


class Queue:
    """A host that enqueues kernels and a device that runs them later, each with a clock of its own in seconds."""

    def __init__(self, monkeypatch) -> None:
        self.host, self.device, self.waits = 0.0, 0.0, 0
        queue = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: str) -> None:
                assert stream == "stream of cuda:1"
                self.at = max(queue.device, queue.host)  # when the device comes to it

            def query(self) -> bool:
                return self.at <= queue.host

            def elapsed_time(self, end: "Event") -> float:
                assert end.query(), "an error in CUDA: the event has not been reached"
                return 1000 * (end.at - self.at)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
        monkeypatch.setattr(time, "perf_counter", lambda: self.host)

    def launch(self, seconds: float, host: float = 0.0) -> None:
        self.device = max(self.device, self.host) + seconds
        self.host += host

    def wait(self) -> None:
        self.host = max(self.host, self.device)


def test_on_a_device_each_stage_has_the_time_of_its_kernels_and_the_last_optimizer_step_counts_as_update(monkeypatch):
    queue = Queue(monkeypatch)
    for tail in (0, 0.5):  # a first step, then one with an optimizer step still in the queue
        times = StageTimes(torch.device("cuda", 1))
        with times.during("generate"):
            queue.launch(4)
            queue.wait()
        queue.host += 0.25  # rewards
        with times.during("update"):
            for _ in range(2):
                queue.launch(1, host=0.01)
                with times.during("credit"):
                    queue.launch(2, host=0.01)
                queue.launch(1, host=0.01)
            queue.wait()
            queue.launch(0.5)
        metrics = times.metrics()
        stages = {name: metrics[f"time/{name}"] for name in STAGES}
        assert stages == pytest.approx({"generate": 4, "credit": 4, "update": 4 + tail, "other": 0.25})
        assert metrics["step_time"] == pytest.approx(sum(stages.values()))


def test_on_the_host_stages_are_apart_and_add_up_whatever_is_inside_what(monkeypatch):
    queue = Queue(monkeypatch)
    times = StageTimes()
    with contextlib.suppress(ValueError), times.during("update"):
        queue.host += 1
        with times.during("credit"):
            queue.host += 2
            raise ValueError("skipped")
    queue.host += 4
    with times.during("correct"):
        queue.host += 8
    assert times.metrics() == {
        "step_time": 15, "time/generate": 0, "time/credit": 2, "time/update": 1, "time/other": 4, "time/correct": 8,
    }  # fmt: skip
