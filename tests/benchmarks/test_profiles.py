"""A profile sums kernels by class and knows when the device stood idle."""

import pytest
import torch

from benchmarks.speed.profiles import Event, busy_microseconds, device_events, summarize

pytestmark = pytest.mark.slow


def test_overlapping_kernels_keep_the_device_busy_once():
    events = [Event("b", 5.0, 9.0), Event("a", 0.0, 4.0), Event("inside a", 1.0, 2.0), Event("c", 8.0, 10.0)]
    assert busy_microseconds(events) == 9.0
    assert busy_microseconds([]) == 0.0


def test_a_summary_adds_up():
    events = [Event("gemm", 0.0, 3e5), Event("gemm", 4e5, 5e5), Event("policy_rows_kernel", 5e5, 6e5)]
    result = summarize(events, seconds=1.0)
    assert (result["busy_seconds"], result["idle_share"], result["launches"]) == (0.5, 0.5, 3)
    assert [(line["name"], round(line["share"], 3), line["launches"]) for line in result["classes"]] == [
        ("matrix products", 0.8, 2),
        ("head and loss", 0.2, 1),
    ]
    assert result["kernels"][0] == {"name": "gemm", "seconds": 0.4, "launches": 2, "share": pytest.approx(0.8)}


def test_on_a_cpu_operators_are_what_the_device_does():
    a = torch.ones(64, 64)
    events = device_events(lambda: torch.relu(a @ a), torch.device("cpu"))
    assert [event.name for event in events] == ["aten::matmul", "aten::relu"]  # not what these call in turn
    assert all(event.end >= event.start for event in events)
