"""Policy losses.

Modules here know tensors only: they sum the losses of tokens, and check what goes into them.
"""

from .policy import contributing_rows, linear_policy_loss, logits_policy_loss, policy_loss

__all__ = ["contributing_rows", "linear_policy_loss", "logits_policy_loss", "policy_loss"]
