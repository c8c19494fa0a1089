"""Policy losses.

A module here knows tensors; what belongs here sums the losses of tokens or checks what goes into them.
"""

from .policy import contributing_rows, linear_policy_loss, logits_policy_loss, policy_loss

__all__ = ["contributing_rows", "linear_policy_loss", "logits_policy_loss", "policy_loss"]
