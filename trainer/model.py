"""The reference model that the KL term compares the policy with.

Where it stands: beside the policy, in the update.
"""

import contextlib
import copy
from collections.abc import Iterator

from torch import nn

from cfa_kernels.hf.liger import keep_own_modules, keeps_own_modules
from cfa_kernels.hf.model import causal_lm


class Reference:
    """The model as it was loaded, for the KL term: the policy with its adapter off, or a frozen copy."""

    def __init__(self, policy: nn.Module) -> None:
        self._policy = policy
        self._copy = None if hasattr(policy, "disable_adapter") else copy.deepcopy(policy).requires_grad_(False)
        if self._copy is not None and keeps_own_modules(causal_lm(policy)):
            keep_own_modules(causal_lm(self._copy))

    @contextlib.contextmanager
    def model(self) -> Iterator[nn.Module]:
        """The reference, while the context lasts."""
        if self._copy is not None:
            yield self._copy
        else:
            with self._policy.disable_adapter():  # type: ignore[operator]
                yield self._policy
