"""Check and pad the inputs of a packed loss, and find how far each row must be fed for it."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..ops.kept_tokens import KeptTokens
from ..ops.upload import upload
from ..options import check_class
from ..rows import Rows, check_columns, check_tokens, pad_rows
from .checks import by_sequence, check_correction, check_level, check_ranges, check_tensor, check_weights
from .policy import contributing_rows


@dataclass(frozen=True)
class LossBatch:
    """Inputs of a loss other than the model's, as padded tensors on the host, and the options of the loss."""

    targets: Tensor  # (B, T) int64
    mask: Tensor  # (B, T) bool
    advantages: Tensor  # (B,) or (B, T)
    old_logprobs: Tensor | None  # (B, T)
    weights: Tensor | None  # (B, T)
    ref_logprobs: Tensor | None  # (B, T)
    sampling_logprobs: Tensor | None  # (B, T)
    needed_tokens: Tensor  # (M,) int64: the flattened tokens whose log-prob the loss needs
    trained: Tensor  # (B,) bool: rows that get a gradient, of others the loss or a metric needs values only
    kept_tokens: list[KeptTokens] | None = None  # B, of the tokens of each row
    options: dict[str, Any] = field(default_factory=dict)  # of `linear_policy_loss`

    @staticmethod
    def of(
        rows: Rows,
        old_logprobs: Sequence[Tensor] | None,
        advantages: Tensor | Sequence[Tensor],
        *,
        weights: Sequence[Tensor] | None = None,
        mask: Sequence[Tensor] | None = None,
        ref_logprobs: Sequence[Tensor] | None = None,
        sampling_logprobs: Sequence[Tensor] | None = None,
        kept_tokens: Sequence[KeptTokens] | None = None,
        **options: Any,
    ) -> "LossBatch":
        """Check the columns of `rows` and pad them; arguments as in `packed_policy_loss`."""
        check_class(Rows, rows=rows)
        lengths = rows.lengths
        if not lengths:
            raise ValueError("completions: a loss needs at least one row, got none")
        columns = {"old_logprobs": old_logprobs, "weights": weights, "ref_logprobs": ref_logprobs}
        columns["sampling_logprobs"] = sampling_logprobs
        padded = {name: None if column is None else _padded(name, column, rows) for name, column in columns.items()}
        counted = torch.arange(max(1, *lengths))[None] < torch.tensor(lengths)[:, None]  # (B, T)
        if mask is not None:
            own = _padded("mask", mask, rows)
            if bad := ((own != 0) & (own != 1)).nonzero().tolist():
                b, t = bad[0]
                raise ValueError(f"mask row {rows.index[b]}: must be 0 or 1, got {own[b, t].item()} at token {t}")
            counted = counted & (own != 0)
        if isinstance(advantages, Tensor):
            check_tensor("advantages", advantages, [torch.Size((len(lengths),))])
            signed = advantages.detach().cpu()
        else:
            signed = _padded("advantages", advantages, rows)
        loss_type, level = check_level(options)
        check_ranges(options)
        check_correction(options | {"sampling_logprobs": sampling_logprobs}, loss_type, level)
        if padded["weights"] is not None:
            check_weights(padded["weights"], counted, loss_type, level)
        contributes = functools.partial(
            contributing_rows, counted, signed, weights=padded["weights"], importance_sampling_level=level,
            whole_rows=by_sequence(options),
        )  # fmt: skip
        bonus = options.get("entropy_coef", 0.0)
        all_trained = ref_logprobs is not None or isinstance(bonus, Tensor) or bonus != 0
        needed = contributes(all_counted=all_trained or bool(options.get("compute_entropy")))
        trained = torch.zeros(len(lengths), dtype=torch.bool)
        trained[contributes(all_counted=all_trained) // counted.shape[1]] = True
        old = padded.pop("old_logprobs")
        if old is not None:  # tokens that no earlier loss needed were never scored
            is_needed = torch.zeros(counted.numel(), dtype=torch.bool).index_fill_(0, needed, True).view_as(counted)
            old = torch.where(is_needed, old, 0.0)
        targets = pad_rows(rows.completions, counted.shape[1])
        kept = None if kept_tokens is None else checked_kept_tokens(kept_tokens, rows, counted)
        return LossBatch(
            targets, counted, signed, old_logprobs=old, **padded, needed_tokens=needed, trained=trained,
            kept_tokens=kept, options=options,
        )  # fmt: skip

    def needed(self) -> list[int]:
        """Count the tokens of each row that must be fed: up to the last one whose log-prob the loss needs."""
        last = torch.zeros(self.mask.shape, dtype=torch.int64)
        last.view(-1)[self.needed_tokens] = self.needed_tokens % self.mask.shape[1] + 1
        return last.amax(1).tolist()

    def to(self, device: torch.device, *others: Tensor) -> tuple[dict[str, Tensor | None], tuple[Tensor, ...]]:
        """Copy the tensors that the loss reads to `device`, and other tensors of the host with them, by one copy."""
        names = [name for name in vars(self) if name not in ("needed_tokens", "trained", "kept_tokens", "options")]
        own = {name: tensor for name in names if (tensor := getattr(self, name)) is not None}
        there = upload([*own.values(), *others], device)
        return dict.fromkeys(names) | dict(zip(own, there, strict=False)), there[len(own) :]


def checked_kept_tokens(
    kept_tokens: Sequence[KeptTokens],
    rows: Rows,
    counted: Sequence[Tensor] | Tensor | None = None,
    vocabulary: int | None = None,
) -> list[KeptTokens]:
    """Return the kept ids of each of `rows` on the host; raise `ValueError` naming row, token and value if they differ.

    They must hold the tokens of `counted` (B, T) bool, by default all.
    """
    check_columns(rows.prompts, kept_tokens=kept_tokens)
    checked = list[KeptTokens]()
    for b, (row, one) in enumerate(zip(rows.index, kept_tokens, strict=True)):
        name, ids = f"kept_tokens row {row}", rows.completions[b]
        check_class(KeptTokens, **{name: one})
        own = None if counted is None else counted[b][: len(ids)]
        place = f"{name}, token {{}}".format
        checked.append(one.checked(place, len(ids), name=name, targets=ids, counted=own, vocabulary=vocabulary))
    return checked


def _padded(name: str, column: Sequence[Tensor], rows: Rows) -> Tensor:
    """Pad B tensors (T_b,) with 0 at the end, to (B, T) on the host."""
    check_tokens(name, column, rows)
    if len({row.device for row in column}) == 1:  # one copy for all, of the dtype that holds all
        column = torch.cat([row.detach() for row in column]).cpu().split(rows.lengths)
    return pad_rows([row.detach().cpu() for row in column], max(1, *rows.lengths))
