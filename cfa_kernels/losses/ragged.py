"""Check and pad the rows of a packed loss, and find how far each must be fed for it."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.upload import upload
from .checks import check_weights
from .policy import contributing_rows


@dataclass(frozen=True)
class LossBatch:
    """Inputs of a loss other than the model's, as padded tensors on the host."""

    targets: Tensor  # (B, T) int64
    mask: Tensor  # (B, T) bool
    advantages: Tensor  # (B,) or (B, T)
    old_logprobs: Tensor | None  # (B, T)
    weights: Tensor | None  # (B, T)
    ref_logprobs: Tensor | None  # (B, T)
    rows: Tensor  # (M,) int64: the flattened tokens whose log-prob the loss needs
    trained: Tensor  # (B,) bool: rows that get a gradient, of others the loss or a metric needs values only

    @staticmethod
    def of(
        completions: Sequence[Tensor],
        old_logprobs: Sequence[Tensor] | None,
        advantages: Tensor | Sequence[Tensor],
        *,
        weights: Sequence[Tensor] | None = None,
        mask: Sequence[Tensor] | None = None,
        ref_logprobs: Sequence[Tensor] | None = None,
        compute_entropy: bool = False,
        **options: Any,
    ) -> "LossBatch":
        """Check the lists row by row and pad them; `options` are those of `policy_loss`."""
        lengths = [len(completion) for completion in completions]
        if not lengths:
            raise ValueError("completions: a loss needs at least one row, got none")
        given = {"old_logprobs": old_logprobs, "weights": weights, "ref_logprobs": ref_logprobs}
        padded = {name: None if rows is None else _padded(name, rows, lengths) for name, rows in given.items()}
        counted = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]  # (B, T)
        if mask is not None:
            kept = _padded("mask", mask, lengths)
            if bad := ((kept != 0) & (kept != 1)).nonzero().tolist():
                b, t = bad[0]
                raise ValueError(f"mask row {b}: must be 0 or 1, got {kept[b, t].item()} at token {t}")
            counted = counted & (kept != 0)
        if isinstance(advantages, Tensor):
            if advantages.shape != (len(lengths),):
                raise ValueError(
                    f"advantages must be ({len(lengths)},) or a list of rows, got shape {tuple(advantages.shape)}"
                )
            signed = advantages.detach().cpu()
        else:
            signed = _padded("advantages", advantages, lengths)
        level = options.get("importance_sampling_level", "token")
        if padded["weights"] is not None:
            check_weights(padded["weights"], counted, options.get("loss_type", "dapo"), level)
        contributes = functools.partial(
            contributing_rows, counted, signed, weights=padded["weights"], importance_sampling_level=level
        )
        all_trained = ref_logprobs is not None or bool(options.get("entropy_coef"))
        rows = contributes(all_counted=all_trained or compute_entropy)
        trained = torch.zeros(len(lengths), dtype=torch.bool)
        trained[contributes(all_counted=all_trained) // counted.shape[1]] = True
        old = padded["old_logprobs"]
        if old is not None:  # tokens that no earlier loss needed were never scored
            needed = torch.zeros(counted.numel(), dtype=torch.bool).index_fill_(0, rows, True).view_as(counted)
            old = torch.where(needed, old, 0.0)
        return LossBatch(
            targets=_padded("completions", completions, lengths),
            mask=counted,
            advantages=signed,
            old_logprobs=old,
            weights=padded["weights"],
            ref_logprobs=padded["ref_logprobs"],
            rows=rows,
            trained=trained,
        )

    def needed(self) -> list[int]:
        """Count the tokens of each row that must be fed: up to the last one whose log-prob the loss needs."""
        last = torch.zeros(self.mask.shape, dtype=torch.int64)
        last.view(-1)[self.rows] = self.rows % self.mask.shape[1] + 1
        return last.amax(1).tolist()

    def to(self, device: torch.device, *others: Tensor) -> tuple["LossBatch", tuple[Tensor, ...]]:
        """Copy the batch to `device`, and other tensors of the host with it, by one copy."""
        given = {name: tensor for name, tensor in vars(self).items() if tensor is not None}
        there = upload([*given.values(), *others], device)
        moved: dict[str, Any] = dict.fromkeys(vars(self)) | dict(zip(given, there, strict=False))
        return LossBatch(**moved), there[len(given) :]


def _padded(name: str, rows: Sequence[Tensor], lengths: list[int]) -> Tensor:
    """Pad B tensors (T_b,) with 0 at the end, to (B, T) on the host."""
    if len(rows) != len(lengths):
        raise ValueError(f"{name} has {len(rows)} rows, completions has {len(lengths)}; they must agree")
    for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if not isinstance(row, Tensor) or row.shape != (length,):
            got = f"shape {tuple(row.shape)}" if isinstance(row, Tensor) else type(row).__name__
            like = "" if name == "completions" else " like its completion"
            raise ValueError(f"{name} row {b}: must be a tensor ({length},){like}, got {got}")
    if len({row.device for row in rows}) == 1 and len({row.dtype for row in rows}) == 1:  # one copy for all
        rows = torch.cat([row.detach() for row in rows]).cpu().split(lengths)
    return nn.utils.rnn.pad_sequence([row.detach().cpu() for row in rows], batch_first=True)
