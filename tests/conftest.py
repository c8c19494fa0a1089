"""Shared set-up: Triton's interpreter where there is no GPU, repeatable properties, paths to real data."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED_GSM8K = Path(os.environ.get("GSM8K", REPOSITORY.parent / "shared" / "gsm8k"))


def fill_fresh_memory() -> None:
    """Make each byte that nobody wrote 0x7f (glibc): what reads it fails each time and not once in a hundred."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(-6, 0x80)  # M_PERTURB


# With `-n` the first process only hands tests out to workers: it imports nothing that takes seconds.
if "PYTEST_XDIST_WORKER" in os.environ or not re.search(" -n ?[^0 ]", " ".join(sys.argv)):
    from hypothesis import settings

    # The same examples in every run, and no stop-watch: a busy machine must not fail a test.
    settings.register_profile("suite", deadline=None, derandomize=True)
    settings.load_profile("suite")

    fill_fresh_memory()

    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"

    from tests.support import as_on_gpu, interpreter

    if not torch.cuda.is_available():
        as_on_gpu.install()
        interpreter.install()


pytest_plugins = ["tests.support.served"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Kernels are built first: no worker starts these long files when the others have nothing left to do."""
    items.sort(key=lambda item: not item.path.name.startswith("test_aot_"))


def pytest_collection_finish() -> None:
    """Spare what was imported: every training collects garbage, and would look at all of it again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a test as soon as it fails: a run on a machine that is lent for minutes may be cut before its summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid}", flush=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    """Without a GPU, refuse what one would refuse."""
    real = torch.cuda.is_available() or item.get_closest_marker("traced")
    with contextlib.nullcontext() if real else as_on_gpu.mode_of(item):
        return (yield)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run in this suite: the GPU if there is one, else what stands in for it, by the interpreter."""
    return as_on_gpu.DEVICE


@pytest.fixture(scope="module")
def qwen3(device: torch.device) -> torch.nn.Module:
    """A small model with attention only."""
    from tests.support.models import make_model

    return make_model("Qwen3")


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train and score without the check of the model, which other tests run."""
    from cfa_kernels.model.head import read_head
    from cfa_kernels.scoring import masked, packed

    for module, check in ((packed, "check_trainable"), (masked, "check_supported")):
        monkeypatch.setattr(module, check, lambda walk, **_: read_head(walk.model))


@pytest.fixture(scope="session")
def gsm8k() -> Path:
    """Folder of real GSM8K problems and model solutions; absent on a newcomer's machine."""
    if not SHARED_GSM8K.is_dir():
        pytest.skip("GSM8K is not on this machine; docs/benchmarks.md says how to get it")
    return SHARED_GSM8K


@pytest.fixture
def poisoned_memory(monkeypatch):
    """torch.empty gives nan, so that an output nobody wrote shows."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_tiles(monkeypatch):
    """Rows of a few dozen logits take several tiles and end in a ragged one."""
    from cfa_kernels.ops import row_logprobs

    tiles = {"BLOCK": 32, "VECTOR": 4, "num_warps": 1}
    monkeypatch.setattr(row_logprobs, "launch_options", lambda *_, **__: dict(tiles))
