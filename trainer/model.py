"""Log-probs of completions under the policy, with gradient, and the reference that the KL term compares it with.

Where it stands: between a transformers model and the update.
"""

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from cfa_kernels import linear_logprob
from cfa_kernels.hf import backbone, causal_lm
from cfa_kernels.proof import prove_head


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


def completion_logprobs(
    model: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    *,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Log-probs of completion tokens and entropies of the distributions they come from, both (B, T) fp32, nats.

    Prompts (B, P) are left-padded, completions (B, T) right-padded; padding holds 0. The head runs on counted rows
    alone and logits are never held as a whole. Differentiable by the model's parameters.

    Raises:
        NotImplementedError: the model's logits are not its head's output; see `cfa_kernels.proof.prove_head`.
    """
    causal = causal_lm(model)
    head = prove_head(causal)
    mask = torch.cat([prompt_mask, completion_mask], 1)
    hidden = backbone(causal)(
        input_ids=torch.cat([prompt_ids, completion_ids], 1),
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        use_cache=False,
    ).last_hidden_state[:, prompt_ids.shape[1] - 1 : -1]  # (B, T, H): the row before a token predicts it
    counted = completion_mask.bool()
    rows = linear_logprob(
        hidden[counted],
        head.weight,
        completion_ids[counted],
        temperature=temperature,
        return_entropy=True,
        **head.options,
    )
    logprobs, entropies = (torch.zeros(counted.shape, device=mask.device).masked_scatter(counted, row) for row in rows)
    return logprobs, entropies
