"""The reference model that the KL term compares the policy with.

Where it stands: beside the policy, in the update.
"""

import contextlib
import copy
from collections.abc import Iterator

from torch import nn


class Reference:
    """The model as it was loaded, for the KL term: the policy with its adapter off, or a frozen copy."""

    def __init__(self, policy: nn.Module) -> None:
        self._policy = policy
        self._copy = None if hasattr(policy, "disable_adapter") else copy.deepcopy(policy).requires_grad_(False)

    @contextlib.contextmanager
    def model(self) -> Iterator[nn.Module]:
        """The reference, while the context lasts."""
        if self._copy is not None:
            yield self._copy
        else:
            with self._policy.disable_adapter():  # type: ignore[operator]
                yield self._policy
