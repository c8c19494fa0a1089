"""The device clock times the device, however slow the host is: on a device that is all make-believe."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness import race as module
from benchmarks.harness.race import Budget, Contender, race
from tests.support.operator_calls import OperatorCalls

pytestmark = pytest.mark.slow

CYCLES_PER_SECOND = 1.5e9


class Device:
    """One queue of work, the host's clock beside it, and what was put into the queue in which order."""

    def __init__(self) -> None:
        self.now = self.free_at = 0.0
        self.log: list[str] = []
        self.spins: list[float] = []

    def put(self, name: str, seconds: float, host_seconds: float = 0.0) -> float:
        """Launch work; returns when it will be done."""
        self.now += host_seconds
        self.log.append(name)
        self.free_at = max(self.free_at, self.now) + seconds
        return self.free_at

    def sleep(self, cycles: int) -> None:
        self.spins.append(cycles / CYCLES_PER_SECOND)
        self.put("spin", self.spins[-1])

    def synchronize(self, device: torch.device | None = None) -> None:
        self.now = max(self.now, self.free_at)

    def event(self, enable_timing: bool) -> SimpleNamespace:
        made = SimpleNamespace(at=None)
        made.record = lambda: setattr(made, "at", self.put("event", 0.0, 1e-6))
        made.elapsed_time = lambda end: (end.at - made.at) * 1e3
        return made


@pytest.fixture
def device(monkeypatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "_sleep", device.sleep)
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    monkeypatch.setattr(module, "_clear_cache", lambda _: device.put("clear", 1e-4))
    monkeypatch.setattr(module.time, "perf_counter", lambda: device.now)
    return device


@pytest.mark.parametrize("host_seconds", [1e-6, 1e-3])
def test_the_device_clock_times_the_device_and_not_the_launches(host_seconds, device):
    def run():
        for _ in range(10):
            device.put("work", 2e-5, host_seconds)

    clock = module.DeviceClock(torch.device("cpu"))
    assert [clock(run) for _ in range(3)] == pytest.approx([2e-4] * 3)
    assert clock.facts(3) == {"host_seconds": pytest.approx(10 * host_seconds, abs=1e-5), "rounds_with_host_exposed": 0}
    assert device.log[-15:] == ["clear", "event", "spin", "event", *["work"] * 10, "event"]
    assert device.spins[-1] > 10 * host_seconds


def test_a_job_that_waits_for_the_device_is_timed_with_its_host_and_counted(device):
    def run():
        device.put("work", 2e-5, 1e-5)
        device.synchronize()
        device.put("work", 2e-5, 5e-4)

    clock = module.DeviceClock(torch.device("cpu"))
    assert [clock(run) for _ in range(3)] == pytest.approx([2e-5 + 5e-4 + 2e-5] * 3, abs=1e-5)
    assert clock.facts(3)["rounds_with_host_exposed"] == 3
    assert max(device.spins) < 0.1


def test_a_race_by_the_device_clock_says_what_it_hid(device, monkeypatch):
    monkeypatch.setattr(module, "_checked", lambda contender, _: module.Lap(contender.name, facts={"rows": 3}))
    contender = Contender("short", lambda: device.put("work", 2e-5, 1e-2), lambda _: None)
    laps = race([contender], device=torch.device("cuda"), budget=Budget(0.0, 4, 4), clock="device")
    assert laps["short"].seconds == pytest.approx([2e-5] * 4)
    assert laps["short"].facts == {
        "rows": 3, "host_seconds": pytest.approx(1e-2, abs=1e-5), "rounds_with_host_exposed": 0,
    }  # fmt: skip


def test_the_cache_is_cleared_by_reading(monkeypatch):
    """Written lines would be written back while the job that is clocked runs."""
    monkeypatch.setattr(module, "CACHE_BYTES", 1 << 12)
    module._clear_cache(torch.device("cpu"))  # makes what is read
    with OperatorCalls() as operators:
        module._clear_cache(torch.device("cpu"))
    assert [operator for operator, _ in operators.calls] == [torch.ops.aten.max.default]
