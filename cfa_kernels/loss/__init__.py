"""The policy loss.

Modules here know tensors only: formula, checks, kernels, and the sums of tokens' losses.
"""

from .policy import contributing_rows, linear_policy_loss, logits_policy_loss, policy_loss

__all__ = ["contributing_rows", "linear_policy_loss", "logits_policy_loss", "policy_loss"]
