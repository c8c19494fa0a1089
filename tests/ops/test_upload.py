"""Arrays reach a device as they are, all by one copy from pinned memory."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cfa_kernels.ops.upload import ALIGNMENT, upload
from cfa_kernels.tree.segment_table import SegmentTable
from tests.support.waits import DEVICE, OnDevice, a_device

ARRAYS = [
    np.arange(3, dtype=np.int64),
    torch.tensor([[1.5, -2.0, 0.25]], dtype=torch.bfloat16).t(),  # of other strides
    np.zeros((2, 0), np.int32),
    torch.tensor([True, False, True]),
    np.array(7.0, np.float64),
    np.arange(12, dtype=np.int32).reshape(4, 3)[:, ::2],
]


def test_shapes_dtypes_and_values_stay_and_starts_are_aligned(device):
    for expected, there in zip(map(torch.as_tensor, ARRAYS), upload(ARRAYS, device), strict=True):
        assert there.device.type == device.type
        torch.testing.assert_close(there.cpu(), expected, rtol=0, atol=0)
        assert there.numel() == 0 or there.data_ptr() % ALIGNMENT == 0
    assert upload([], device) == ()


def test_one_copy_from_pinned_memory_takes_them_all(monkeypatch):
    copies = []
    with a_device() as waits:
        send = waits.upload
        monkeypatch.setattr(waits, "upload", lambda host, flag: copies.append(host.nbytes) or send(host, flag))
        there = upload(ARRAYS, DEVICE)
        assert len(copies) == 1
        assert not waits.seen
    assert all(isinstance(tensor, OnDevice) for tensor in there)
    assert [tensor.inner.tolist() for tensor in there] == [torch.as_tensor(array).tolist() for array in ARRAYS]


def test_nothing_is_sent_while_a_graph_is_captured(monkeypatch):
    with a_device():
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match=r"a CUDA graph cannot capture.*run it once before the capture"):
            upload(ARRAYS, DEVICE)
    upload(ARRAYS, torch.device("cpu"))


def test_a_table_is_sent_once_to_each_stream_and_then_found_also_while_a_graph_is_captured(monkeypatch):
    """A copy on one stream need not be done when a kernel on another reads it."""
    table = SegmentTable(*(np.array(column, np.int32) for column in ([0, 3], [3, 2], [0, 0], [0, 3], [0, 1, 2])))
    stream = SimpleNamespace(cuda_stream=0)
    with a_device():
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
        copies = []
        for stream.cuda_stream in (1, 2):
            copies.append((table.on_device(DEVICE, 16), table.key_work_on_device(DEVICE, 16, 16)))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for stream.cuda_stream, (work, keys) in enumerate(copies, start=1):
            assert table.on_device(DEVICE, 16) is work
            assert table.key_work_on_device(DEVICE, 16, 16) is keys
        assert all(first[0] is not second[0] for first, second in zip(*copies, strict=True))
        with pytest.raises(RuntimeError, match="a CUDA graph cannot capture"):
            table.on_device(DEVICE, 32)
