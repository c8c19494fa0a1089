"""Stage times: those of the host, and those of a device that runs behind it."""

import contextlib
import time
from types import SimpleNamespace

import pytest
import torch

from trainer.metrics import STAGES, StageTimes

pytestmark = pytest.mark.slow


class Clocks:
    """Of a host that launches kernels and of a device that runs them later, in seconds."""

    host = device = 0.0

    def launch(self, seconds: float, host: float = 0.0) -> None:
        self.device = max(self.device, self.host) + seconds
        self.host += host

    def wait(self) -> None:
        self.host = max(self.host, self.device)

    def event(self, enable_timing: bool) -> SimpleNamespace:
        made = SimpleNamespace(query=lambda: made.at <= self.host, elapsed_time=lambda end: 1000 * (end.at - made.at))
        made.record = lambda stream: setattr(made, "at", max(self.device, self.host))  # when the device comes to it
        return made


@pytest.fixture
def clocks(monkeypatch) -> Clocks:
    made = Clocks()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(time, "perf_counter", lambda: made.host)
    return made


def test_on_a_device_each_stage_has_the_time_of_its_kernels_and_the_last_optimizer_step_counts_as_update(clocks):
    for tail in (0, 0.5):  # a first step, then one with an optimizer step still in the queue
        times = StageTimes(torch.device("cuda", 1))
        with times.during("generate"):
            clocks.launch(4)
            clocks.wait()
        clocks.host += 0.25  # rewards
        with times.during("update"):
            for _ in range(2):
                clocks.launch(1, host=0.01)
                with times.during("credit"):
                    clocks.launch(2, host=0.01)
                clocks.launch(1, host=0.01)
            clocks.wait()
            clocks.launch(0.5)
        metrics = times.metrics()
        stages = {name: metrics[f"time/{name}"] for name in STAGES}
        assert stages == pytest.approx({"generate": 4, "credit": 4, "update": 4 + tail, "other": 0.25})
        assert metrics["step_time"] == pytest.approx(sum(stages.values()))


def test_on_the_host_stages_are_apart_and_add_up_whatever_is_inside_what(clocks):
    times = StageTimes()
    with contextlib.suppress(ValueError), times.during("update"):
        clocks.host += 1
        with times.during("credit"):
            clocks.host += 2
            raise ValueError("skipped")
    clocks.host += 4
    with times.during("correct"):
        clocks.host += 8
    assert times.metrics() == {
        "step_time": 15, "time/generate": 0, "time/credit": 2, "time/update": 1, "time/other": 4, "time/correct": 8,
    }  # fmt: skip
