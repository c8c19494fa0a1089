"""Hold the token ids that a sampler kept (top-p, top-k, min-p), and normalise strips of logits over them.

The logits of a strip are made of the columns of the head that some row keeps; those that a row does not keep become
-inf, so that the kernels of rows, and the products of the gradients, need not know of them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .upload import upload

_COLUMNS = 128  # columns are a multiple of it, so that sizes of products repeat


class KeptTokens(NamedTuple):
    """Token ids that each of N tokens was drawn from: those of token n are `ids[offsets[n] : offsets[n + 1]]`.

    A token without ids was drawn from the whole vocabulary. Order and repetitions do not matter, but an id with a
    log-prob may not repeat. Keep all on the host.
    """

    offsets: Tensor  # (N + 1,) integers, from 0 to K, never falling
    ids: Tensor  # (K,) integers
    logprobs: Tensor | None = None  # (K,) of the sampler, nats, normalised over the ids of each token

    @classmethod
    def of(
        cls,
        tokens: Sequence[Any] | Tensor,
        logprobs: Sequence[Sequence[float] | Tensor] | None = None,
        *,
        offsets: Sequence[int] | Tensor | None = None,
    ) -> "KeptTokens":
        """Take the ids of N tokens one by one, as lists or 1-D tensors, perhaps with their log-probs.

        With `offsets` (N + 1,) all ids are one list, and log-probs too.
        """
        if offsets is not None:
            flat = None if logprobs is None else torch.as_tensor(logprobs)
            return cls(torch.as_tensor(offsets), torch.as_tensor(tokens), flat)
        parts = [torch.as_tensor(ids) for ids in tokens]
        for n, ids in enumerate(parts):
            if len(ids) and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
                raise TypeError(f"tokens[{n}]: ids must be integers, got {ids.dtype}")
        parts = [ids.long() for ids in parts]
        counts = torch.tensor([len(ids) for ids in parts], dtype=torch.int64)
        ids = torch.cat(parts) if parts else counts
        if logprobs is None:
            return cls.of_counts(counts, ids)
        values = [torch.as_tensor(row, dtype=torch.float64) for row in logprobs]
        for n, (one, row) in enumerate(zip(parts, values, strict=True)):
            if one.shape != row.shape:
                raise ValueError(f"logprobs[{n}] must be one for each of {len(one)} ids, got shape {tuple(row.shape)}")
        return cls.of_counts(counts, ids, torch.cat(values) if values else counts.double())

    @classmethod
    def of_counts(cls, counts: Tensor, ids: Tensor, logprobs: Tensor | None = None) -> "KeptTokens":
        """Cut ids (K,), and their log-probs (K,), into those of N tokens by their numbers (N,)."""
        return cls(torch.nn.functional.pad(counts.cumsum(0), (1, 0)), ids, logprobs)

    @classmethod
    def joined(cls, parts: Sequence["KeptTokens"], counts: Tensor | None = None) -> "KeptTokens":
        """Put several together, one after the other, with log-probs if all ids have some; cut by `counts` if given."""
        some = [one for one in parts if len(one.ids)]
        logprobs = [one.logprobs for one in some if one.logprobs is not None]
        return cls.of_counts(
            torch.cat([one.counts for one in parts]) if counts is None else counts,
            torch.cat([one.ids for one in parts]),
            torch.cat(logprobs) if some and len(logprobs) == len(some) else None,
        )

    @property
    def counts(self) -> Tensor:
        """Count the ids of each token, (N,)."""
        return self.offsets.diff()

    def take(self, index: Tensor | slice) -> "KeptTokens":
        """Take some tokens, in the order of `index`."""
        if isinstance(index, slice):
            offsets = self.offsets[index.start : index.stop + 1]
            inside = slice(offsets[0], offsets[-1])
            logprobs = None if self.logprobs is None else self.logprobs[inside]
            return KeptTokens(offsets - offsets[0], self.ids[inside], logprobs)
        counts, starts = self.counts[index], self.offsets[:-1][index]
        first = torch.repeat_interleave(starts - counts.cumsum(0) + counts, counts)
        index = first + torch.arange(len(first))
        return self.of_counts(counts, self.ids[index], None if self.logprobs is None else self.logprobs[index])

    def tokens(self) -> Tensor:
        """Number the token of each id, (K,)."""
        return torch.repeat_interleave(torch.arange(len(self.offsets) - 1), self.counts)

    def checked(
        self,
        place: Callable[[int], str],
        count: int,
        *,
        name: str = "kept_tokens",
        targets: Tensor | None = None,
        counted: Tensor | None = None,
        vocabulary: int | None = None,
    ) -> "KeptTokens":
        """Return them on the host as int64; raise `ValueError` unless they fit `count` tokens, naming `place(n)`.

        Ids must be in the vocabulary, and, for `counted` tokens (N,), hold those of `targets` (N,), where given.
        """
        for field, part in (("offsets", self.offsets), ("ids", self.ids)):
            if part.is_floating_point() or part.is_complex() or part.dtype == torch.bool:
                raise TypeError(f"{name}: {field} must be integers, got {part.dtype}")
        kept = KeptTokens(self.offsets.cpu().long(), self.ids.cpu().long(), self.logprobs)
        offsets, ids, logprobs = kept
        if offsets.shape != (count + 1,) or ids.ndim != 1:
            got = f"{tuple(offsets.shape)} and {tuple(ids.shape)}"
            raise ValueError(f"{name}: must hold offsets ({count + 1},) and ids (K,) for {count} tokens, got {got}")
        if offsets[0] != 0 or offsets[-1] != len(ids) or (kept.counts < 0).any():
            raise ValueError(f"{name}: offsets must rise from 0 to {len(ids)}, the number of ids, got {offsets}")
        if logprobs is not None:
            if not logprobs.is_floating_point() or logprobs.shape != ids.shape:
                got = f"{logprobs.dtype} of shape {tuple(logprobs.shape)}"
                raise ValueError(f"{name}: logprobs must be floating point, one for each of {len(ids)} ids, got {got}")
            logprobs = logprobs.detach().cpu()
            kept = kept._replace(logprobs=logprobs.to(torch.promote_types(logprobs.dtype, torch.float32)))
            keys = kept.tokens() * (int(ids.max()) + 1 if len(ids) else 1) + ids
            order = keys.argsort()
            if len(twice := (keys[order].diff() == 0).nonzero()):
                i = int(order[twice[0]])
                raise ValueError(
                    f"{place(int(kept.tokens()[i]))}: id {int(ids[i])} is there twice; with log-probs it may not be"
                )
        outside = (ids < 0) if vocabulary is None else (ids < 0) | (ids >= vocabulary)
        if outside.any():
            i = int(outside.nonzero()[0])
            limit = "must not be negative" if vocabulary is None else f"must be in the vocabulary [0, {vocabulary})"
            raise ValueError(f"{place(int(kept.tokens()[i]))}: ids {limit}, got {int(ids[i])}")
        if targets is not None:
            token, targets = kept.tokens(), targets.cpu()
            holds = (kept.counts == 0).index_fill_(0, token[ids == targets[token]], True)
            if counted is not None:
                holds |= ~counted.cpu()
            if not holds.all():
                n = int((~holds).nonzero()[0])
                raise ValueError(
                    f"{place(n)}: must hold the sampled token {int(targets[n])}, got {int(kept.counts[n])} other ids; "
                    "give the ids that the sampler kept at this token, or none for the whole vocabulary"
                )
        return kept


def padded_kept_tokens(rows: Sequence[KeptTokens], width: int) -> KeptTokens:
    """Put the tokens of B rows into a grid of (B, width), flattened; padding has no ids."""
    counts = torch.zeros(len(rows), width, dtype=torch.int64)
    for line, one in zip(counts, rows, strict=True):
        line[: len(one.offsets) - 1] = one.counts
    return KeptTokens.joined(rows, counts.flatten())


class KeptLogits(NamedTuple):
    """The logits of M rows at the K ids that they keep, as the product made them, and the sampler's log-probs there."""

    line: Tensor  # (K,) int64, rows
    column: Tensor  # (K,) int64
    values: Tensor  # (K,)
    counts: Tensor  # (M,) int64, of each row
    logprobs: Tensor  # (K,), nats


class Support(NamedTuple):
    """Columns of the head in the strips of logits of M rows: all, or those that some row keeps."""

    head: Tensor  # (U, H)
    bias: Tensor | None  # (U,)
    targets: Tensor  # (N,), numbers of columns
    kept: KeptTokens | None  # of the M rows, numbers of columns
    columns: Tensor | None = None  # (U,) of the vocabulary; None for all

    @classmethod
    def of(cls, head: Tensor, bias: Tensor | None, targets: Tensor, kept: KeptTokens | None) -> "Support":
        """Omit columns if every row has ids, and together they are at most a quarter of the vocabulary."""
        if kept is None or not len(kept.ids) or not kept.counts.all():
            return cls(head, bias, targets, kept)
        size = len(head)
        seen = torch.zeros(size, dtype=torch.bool).index_fill_(0, kept.ids, True)
        others = (~seen).nonzero().flatten()
        seen[others[: -(size - len(others)) % _COLUMNS]] = True
        columns, place = seen.nonzero().flatten(), torch.where(seen, seen.cumsum(0) - 1, -1)
        if len(columns) * 4 > size:
            return cls(head, bias, targets, kept)
        there, place_there = upload([columns, place], head.device)
        # A target outside the vocabulary, or that no row keeps, stays outside.
        own = torch.where((targets >= 0) & (targets < size), place_there[targets.clamp(0, size - 1)], -1)
        kept = kept._replace(ids=place[kept.ids])
        return cls(head[there], None if bias is None else bias[there], own, kept, there)

    def restrict(self, logits: Tensor, rows: slice) -> KeptLogits | None:
        """Write -inf over the logits (n, U) of `rows` that they do not keep; give the others if they have log-probs."""
        if self.kept is None or not len((part := self.kept.take(rows)).ids):
            return None
        some = part.counts.nonzero().flatten()
        sampled = [] if part.logprobs is None else [part.counts, part.logprobs]
        line, column, open_lines, *sampled = upload([part.tokens(), part.ids, some, *sampled], logits.device)
        values = logits[line, column]
        logits.index_fill_(0, open_lines, float("-inf")) if len(some) < len(logits) else logits.fill_(float("-inf"))
        logits[line, column] = values
        return KeptLogits(line, column, values, *sampled) if sampled else None

    def widened(self, total: Tensor, vocabulary: int) -> Tensor:
        """Put the gradient by the head or the bias, (U, ...), or an empty one, among zeros for the other columns."""
        if self.columns is None or not total.numel():
            return total
        return total.new_zeros(vocabulary, *total.shape[1:]).index_copy_(0, self.columns, total)
