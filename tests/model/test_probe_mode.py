"""The model comes back from a check exactly as it was, wherever an error or Ctrl-C ends it."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cfa_kernels.model.check.probe_mode import float32_weights
from cfa_kernels.model.walk import ModelWalk
from tests.support.models import small_adapted, snapshot


class FailsAt(TorchDispatchMode):
    """Raise an error in place of the operation of this number."""

    def __init__(self, number: int, error: type[BaseException]) -> None:
        super().__init__()
        self.left, self.error = number, error

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if not self.left:
            raise self.error("injected")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, torch.OutOfMemoryError), (torch.bfloat16, KeyboardInterrupt)]
)
def test_an_error_at_any_operation_of_a_probe_leaves_weights_and_flags_as_they_were(dtype, error):
    model = small_adapted().to(dtype)
    ids, before = torch.arange(4, 8, device=model.device)[None], snapshot(model)
    walk = ModelWalk.of(model.get_base_model())
    for number in itertools.count(1):
        mode = FailsAt(number, error)
        try:
            with torch.no_grad(), mode, float32_weights(walk):
                model(input_ids=ids)
        except error:
            assert snapshot(model) == before
        else:
            break
    assert number > 100
    assert snapshot(model) == before
