"""Check and pad the inputs of a packed loss, and find how far each row must be fed for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..batch import Batch, batch_and_options
from ..ops.kept_tokens import KeptTokens, padded_kept_tokens
from ..ops.upload import upload
from ..options import check_class
from ..rows import Rows, check_columns, pad_rows
from .centering import check_centering, check_joins
from .checks import check_weights
from .linear import contributing
from .options import LossOptions, made_options
from .token_loss import Tokens


@dataclass(frozen=True)
class LossBatch:
    """Arguments of the loss's operator, checked and padded on the host, and the tokens that it needs of a forward."""

    index: Sequence[int]  # by which errors name rows
    columns: dict[str, Tensor]  # (B, T) each, advantages perhaps (B,); those that the batch has, and targets
    needed_tokens: Tensor  # (M,) int64: the flattened tokens whose log-prob the loss needs
    trained: Tensor  # (B,) bool: rows that get a gradient, of others the loss or a metric needs values only
    kept_tokens: list[KeptTokens] | None  # B, of the tokens of each row
    options: dict[str, Any]  # of `linear_policy_loss`

    @staticmethod
    def of(rows: Rows | Batch, **options: Any) -> "LossBatch":
        """Check columns and options, and pad the columns; arguments as in `packed_policy_loss`."""
        batch, options = batch_and_options(rows, options)
        if not len(batch):
            raise ValueError("completions: a loss needs at least one row, got none")
        if batch.advantages is None:
            raise ValueError("advantages: a loss needs them, got None")
        lengths = torch.tensor(batch.rows.lengths)
        width = max(1, int(lengths.max()))
        columns = _padded(width, {name: getattr(batch, name) for name in ("advantages", "weights", "mask", *_LOGPROBS)})
        counted = torch.arange(width)[None] < lengths[:, None]  # (B, T)
        columns["mask"] = counted & columns["mask"] if "mask" in columns else counted
        names = ("loss_options", *LossOptions.__annotations__)
        loss = made_options({name: options.pop(name) for name in names if name in options})
        options["loss_options"] = loss
        columns["targets"] = pad_rows(batch.rows.completions, width)
        kept = batch.kept_tokens
        kept = None if kept is None else checked_kept_tokens(kept, batch.rows, columns["mask"])
        if options.get("score_centering"):
            check_joins(loss.joins_tokens)
        return LossBatch._of(batch.index, columns, kept, options)

    def credited(self, **columns: Any) -> "LossBatch":
        """Exchange `weights`, perhaps on the device by now, and `advantages` for credit's, (B,) or B tensors (T_b,)."""
        padded = _padded(self.columns["mask"].shape[1], columns)
        return LossBatch._of(self.index, self.columns | padded, self.kept_tokens, self.options)

    @staticmethod
    def _of(
        index: Sequence[int], columns: dict[str, Tensor], kept: list[KeptTokens] | None, options: dict[str, Any]
    ) -> "LossBatch":
        loss, width, weights = options["loss_options"], columns["mask"].shape[1], columns.get("weights")
        check_weights(weights, columns["mask"], loss)
        if weights is not None and weights.device != columns["mask"].device:
            weights = None  # unread: what is needed without weights is enough
        advantages = columns["advantages"]
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        tokens = Tokens(None, advantages, weights, None, None, columns["mask"])
        counts, moves = (contributing(tokens, joins_tokens=loss.joins_tokens, every=every) for every in (True, False))
        bonus = isinstance(loss.entropy_coef, Tensor) or loss.entropy_coef != 0
        trained = counts if "ref_logprobs" in columns or bonus else moves
        needed = counts if options.get("compute_entropy") else trained
        if options.get("score_centering"):
            sampled = {name: columns[name].flatten() for name in _LOGPROBS[::2] if name in columns}
            check_centering(
                None if kept is None else padded_kept_tokens(kept, width),
                lambda n: f"kept_tokens row {index[n // width]}, token {n % width}",
                targets=columns["targets"].flatten(), moved=moves.flatten(), **sampled,
            )  # fmt: skip
        return LossBatch(index, columns, needed.flatten().nonzero().flatten(), trained.any(1), kept, options)

    def needed(self) -> list[int]:
        """Count the tokens of each row that must be fed: up to the last one whose log-prob the loss needs."""
        last = torch.zeros(self.columns["mask"].shape, dtype=torch.int64)
        last.view(-1)[self.needed_tokens] = self.needed_tokens % last.shape[1] + 1
        return last.amax(1).tolist()

    def to(self, device: torch.device, *others: Tensor) -> tuple[dict[str, Tensor | None], tuple[Tensor, ...]]:
        """Copy the tensors that the loss reads to `device`, and other tensors of the host with them, by one copy."""
        columns = dict(self.columns)
        if (old := columns.get("old_logprobs")) is not None:  # tokens that no earlier loss needed were never scored
            columns["old_logprobs"] = torch.zeros_like(old)
            columns["old_logprobs"].view(-1)[self.needed_tokens] = old.view(-1)[self.needed_tokens]
        here = {name: column for name, column in columns.items() if column.device.type == "cpu"}
        there = upload([*here.values(), *others], device)
        absent: dict[str, Tensor | None] = dict.fromkeys(("old_logprobs", "weights", *_LOGPROBS))
        return absent | columns | dict(zip(here, there, strict=False)), there[len(here) :]


def _padded(width: int, columns: Mapping[str, Any]) -> dict[str, Tensor]:
    given = {name: column for name, column in columns.items() if column is not None}
    return {name: one if isinstance(one, Tensor) else pad_rows(one, width) for name, one in given.items()}


_LOGPROBS = ("old_logprobs", "ref_logprobs", "sampling_logprobs")


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
