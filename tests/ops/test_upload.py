"""Arrays reach a device as they are, all by one copy from pinned memory."""

import numpy as np
import torch

from cfa_kernels.ops.upload import ALIGNMENT, upload
from tests.waits import DEVICE, OnDevice, a_device

ARRAYS = [
    np.arange(3, dtype=np.int64),
    torch.tensor([[1.5, -2.0, 0.25]], dtype=torch.bfloat16).t(),  # of other strides
    np.zeros((2, 0), np.int32),
    torch.tensor([True, False, True]),
    np.array(7.0, np.float64),
    np.arange(12, dtype=np.int32).reshape(4, 3)[:, ::2],
]


def test_shapes_dtypes_and_values_stay_and_starts_are_aligned(device):
    for given, there in zip(ARRAYS, upload(ARRAYS, device), strict=True):
        expected = torch.as_tensor(given)
        assert there.device.type == device.type
        torch.testing.assert_close(there.cpu(), expected, rtol=0, atol=0)
        assert there.numel() == 0 or there.data_ptr() % ALIGNMENT == 0


def test_nothing_to_send_is_nothing(device):
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
    assert [tensor.inner.tolist() for tensor in there] == [torch.as_tensor(given).tolist() for given in ARRAYS]
