"""Fixtures of tests of kernels: memory that shows what nobody wrote, tiles that small rows do not fill."""

import pytest
import torch

from cfa_kernels.ops import policy_rows


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
    tiles = {"BLOCK": 32, "VECTOR": 4, "num_warps": 1}
    monkeypatch.setattr(policy_rows, "launch_options", lambda *_, **__: dict(tiles))
