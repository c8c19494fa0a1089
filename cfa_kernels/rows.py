"""Hold the prompts and completions of a batch, unpadded: the one form in which rows pass through the library."""

import hashlib
from collections import defaultdict
from collections.abc import Sequence, Sized
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .options import check_class


class Rows:
    """Prompts (P_b,), none of them empty, and completions (T_b,) of a batch, unpadded, int64 on the host.

    `index` has the number of each row in the whole batch of all processes, by default 0 to B - 1: errors name it, and
    what is drawn for a row depends on it. `lengths` has the tokens of each completion.
    """

    def __init__(
        self, prompts: Sequence[Tensor], completions: Sequence[Tensor], index: Sequence[int] | None = None
    ) -> None:
        check_columns(prompts, completions=completions, **({} if index is None else {"index": index}))
        self.index = list(range(len(prompts))) if index is None else [int(number) for number in index]
        self.prompts = _on_host("prompts", prompts, self.index, at_least=1)
        self.completions = _on_host("completions", completions, self.index, at_least=0)
        self.lengths = list(map(len, self.completions))

    @classmethod
    def from_padded(
        cls, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, completion_mask: Tensor,
        index: Sequence[int] | None = None,
    ) -> "Rows":  # fmt: skip
        """Take the padding off prompts (B, P), padded on the left, and completions (B, T), padded on the right."""
        prompts = _unpad("prompt", prompt_ids, prompt_mask, left=True)
        return cls(prompts, _unpad("completion", completion_ids, completion_mask, left=False), index)

    def __len__(self) -> int:
        return len(self.prompts)

    def whole(self, row: int) -> np.ndarray:
        """Join prompt and completion of a row."""
        return np.concatenate([self.prompts[row].numpy(), self.completions[row].numpy()])

    @classmethod
    def joined(cls, parts: Sequence["Rows"]) -> "Rows":
        """Put rows together, one after the other, with their index."""
        columns = zip(*((part.prompts, part.completions, part.index) for part in parts), strict=True)
        return cls(*(list(chain.from_iterable(column)) for column in columns))

    def __getstate__(self) -> dict[str, Any]:
        # As arrays: a tensor that is a view of others takes all of them along.
        return vars(self) | {name: [ids.numpy() for ids in vars(self)[name]] for name in ("prompts", "completions")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for name in ("prompts", "completions"):  # copies: what Ray hands over cannot be written
            setattr(self, name, [torch.tensor(ids) for ids in state[name]])

    def take(self, rows: Sequence[int] | Tensor) -> "Rows":
        """Copy some rows, with their index; `rows` are their numbers, or a mask (B,) bool."""
        part, rows = object.__new__(Rows), row_numbers(rows, len(self))  # what was checked is not checked again
        for name, column in vars(self).items():
            setattr(part, name, [column[b] for b in rows])
        return part


def pad_rows(rows: Sequence[Tensor], width: int | None = None, value: float = 0) -> Tensor:
    """Pad B tensors (T_b,) of one dtype with `value` at the end, to (B, width); by default as wide as the longest."""
    if not len(rows):
        return torch.zeros(0, width or 0)
    longest = max(map(len, rows))
    width = longest if width is None else width
    if width < longest:
        raise ValueError(f"width must be at least {longest}, the longest row, got {width}")
    if len(kinds := {str(row.dtype) for row in rows}) > 1:
        raise ValueError(f"rows must share a dtype, got {' and '.join(sorted(kinds))}")
    padding = rows[0].new_full((width,), value)
    return torch.cat([part for row in rows for part in (row, padding[len(row) :])]).view(len(rows), width)


def row_numbers(rows: Any, count: int) -> list[int]:
    """List the rows that numbers or a mask, of bool, choose from `count`; raise `ValueError` for any other value."""
    try:
        chosen = [*(rows.tolist() if isinstance(rows, Tensor | np.ndarray) else rows)]
        flags = [isinstance(value, bool | np.bool_) for value in chosen]
        if len(chosen) == count and all(flags):
            return [b for b, value in enumerate(chosen) if value]
        if not any(flags):
            return [range(count)[value] for value in chosen]
    except (TypeError, IndexError):
        pass
    raise ValueError(f"rows must be numbers of {count} rows, or a mask ({count},) of bool, got {rows!r:.80}")


def equal_prompts(prompts: Sequence[Tensor]) -> list[int]:
    """Number equal prompts equally, in order of appearance."""
    group_of: dict[bytes, int] = {}
    return [group_of.setdefault(prompt.numpy().tobytes(), len(group_of)) for prompt in prompts]


def fed_together(rows: Rows) -> list[int]:
    """Number rows alike that share a beginning, in order of appearance: to be fed side by side, so that it is fed once.

    These are rows of one prompt, and rows whose prompt goes on as another one's completion begins.
    """
    prompts, firsts = [row.numpy().tobytes() for row in rows.prompts], defaultdict[bytes, set[bytes]](set)
    for prompt, completion in zip(prompts, rows.completions, strict=True):
        firsts[prompt].add(completion[:1].numpy().tobytes())
    before, root_of = list[bytes](), dict[bytes, bytes]()
    for prompt in sorted(firsts):  # each directly before those that it begins
        while before and not prompt.startswith(before[-1]):
            before.pop()
        earlier = (own for own in before if prompt[len(own) : len(own) + 8] in firsts[own])
        root_of[prompt] = root_of.get(next(earlier, b""), prompt)
        before.append(prompt)
    numbers: dict[bytes, int] = {}
    return [numbers.setdefault(root_of[prompt], len(numbers)) for prompt in prompts]


def keyed_generator(*key: object, device: torch.device | str = "cpu") -> torch.Generator:
    """Make the generator of a key, integers and strings: the same key gives the same draws in every process."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def check_columns(prompts: Sized, **columns: Sized) -> None:
    """Raise `ValueError` naming a column that is a padded tensor, or has another number of rows than `prompts`."""
    for name, column in {"prompts": prompts, **columns}.items():
        if isinstance(column, Tensor) and column.ndim > 1:
            got = f"got one tensor {tuple(column.shape)}; Rows.from_padded takes padding off"
            raise ValueError(f"{name}: must be a list of 1-D tensors without padding, {got}")
        if not isinstance(column, Sized) or (isinstance(column, Tensor) and not column.ndim):
            remedy = f"; give its `{name}`" if hasattr(column, name) else ""
            raise ValueError(f"{name}: must hold an item for each row, got {type(column).__name__}{remedy}")
        if len(column) != len(prompts):
            raise ValueError(f"{name} has {len(column)} rows, prompts has {len(prompts)}; they must agree")


def check_floating(name: str, column: Tensor | Sequence[Tensor]) -> None:
    """Raise `ValueError` naming a column, one tensor or one for each row, and its dtype unless that is floating."""
    for values in [column] if isinstance(column, Tensor) else column:
        if not values.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {values.dtype}; convert them with .float()")


def check_tokens(name: str, column: Any, rows: Rows) -> None:
    """Raise `ValueError` unless a column is B tensors (T_b,) like the completions; advantages may be a tensor (B,)."""
    check_columns(rows.prompts, **{name: column})
    whole = f", or all rows one tensor ({len(rows)},)" if name == "advantages" else ""
    if whole and isinstance(column, Tensor):
        return
    for b, row, length in zip(rows.index, column, rows.lengths, strict=True):
        if not isinstance(row, Tensor) or row.shape != (length,):
            got = f"shape {tuple(row.shape)}" if isinstance(row, Tensor) else type(row).__name__
            raise ValueError(f"{name} row {b}: must be a tensor ({length},) like its completion{whole}, got {got}")


def check_finite(
    name: str, index: Sequence[int], column: Tensor | Sequence[Tensor], low: float = -torch.inf, of: str = "token"
) -> None:
    """Raise `ValueError` naming the row, by `index`, place and value of the first number below `low` or not finite."""
    if len(column):
        numbers = column if isinstance(column, Tensor) else torch.cat([row.reshape(-1) for row in column])
        if (numbers.isfinite() & (numbers >= low)).all():
            return
    expected = "finite" if low == -torch.inf else "finite and not negative"
    for b, row in zip(index, column, strict=True):
        for t in (~(row.isfinite() & (row >= low))).flatten().nonzero().flatten().tolist():
            place = f"row {b}, {of} {t}" if row.ndim else f"row {b}"
            raise ValueError(f"{name} {place}: must be {expected}, got {row.flatten()[t].item()}")


def token_ids(where: str, ids: Any, vocab: int | None = None, *, at_least: int = 1) -> Tensor:
    """Check one row of token ids: a 1-D int64 tensor inside the vocabulary. Names `where` and the value."""
    if not isinstance(ids, Tensor) or ids.ndim != 1 or ids.dtype != torch.int64:
        got = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"{where}: must be a 1-D int64 tensor of token ids, got {got}")
    if len(ids) < at_least:
        raise ValueError(f"{where}: is empty")
    if vocab is not None and (bad := (ids < 0) | (ids >= vocab)).any():
        t = int(bad.nonzero()[0])
        raise ValueError(f"{where}: id {int(ids[t])} at position {t} is outside the vocabulary [0, {vocab})")
    return ids


def _on_host(name: str, column: Sequence[Tensor], index: Sequence[int], *, at_least: int) -> list[Tensor]:
    for b, ids in zip(index, column, strict=True):
        token_ids(f"{name} row {b}", ids, at_least=at_least)
    if not len(column):
        return []
    return list(torch.cat(list(column)).cpu().split([len(ids) for ids in column]))  # one copy for all


def _unpad(name: str, ids: Tensor, mask: Tensor, *, left: bool) -> list[Tensor]:
    check_class(Tensor, **{f"{name}_ids": ids, f"{name}_mask": mask})
    if ids.ndim != 2 or mask.shape != ids.shape:
        shapes = f"got {tuple(ids.shape)} and {tuple(mask.shape)}"
        raise ValueError(f"{name}_ids and {name}_mask must be one (B, length) shape, {shapes}")
    ids, mask = ids.cpu(), mask.cpu().bool()  # one copy for the whole batch; rows are views
    width, lengths = ids.shape[1], mask.sum(1)
    if left and (empty := lengths == 0).any():
        raise ValueError(f"{name}_mask row {int(empty.nonzero()[0])}: is all zero, the {name} is empty")
    columns = torch.arange(width)
    expected = columns >= width - lengths[:, None] if left else columns < lengths[:, None]
    if (gaps := (mask != expected).any(1)).any():
        side = "left" if left else "right"
        raise ValueError(f"{name}_mask row {int(gaps.nonzero()[0])}: must be padded only on the {side}, without gaps")
    return [row[width - n :] if left else row[:n] for row, n in zip(ids, lengths.tolist(), strict=True)]
