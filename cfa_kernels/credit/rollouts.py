"""Give each token of a rollout one credit, in however many rows it stands, and count what the rows share."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..batch import Batch
from ..rows import Rows, traces
from ..span import Span
from ..text.find import Reasoning
from ..text.offsets import decoded
from ..text.turns import find_turns
from ..tree.prefix_tree import PrefixTree
from .weights import WeightInputs

Nodes = Mapping[int, np.ndarray]
"""Numbers of the completion tokens (T_b,) of rows, by row: equal where rows of a rollout share a token."""

_COMPARED = 16  # tokens whose text tells a new tokenization from new text


def shared_nodes(rows: Rows) -> Nodes:
    """Number the completion tokens of rows that are not their rollout's only one."""
    nodes, count = dict[int, np.ndarray](), 0
    for members in traces(rows).values():
        tree, paths = _paths(rows, members)
        nodes |= {b: path[len(rows.prompts[b]) :] + count for b, path in paths.items()}
        count += tree.num_tokens
    return nodes


def _paths(rows: Rows, members: Sequence[int]) -> tuple[PrefixTree, dict[int, np.ndarray]]:
    """Lay rows out as a tree, and give the number of each of their tokens, prompts included."""
    tree = PrefixTree()
    return tree, {b: tree.insert(rows.whole(b)) for b in members}


def check_traces(rows: Rows, written: Sequence[Tensor], advantages: Tensor | Sequence[Tensor] | None) -> None:
    """Raise `ValueError` naming rollout, turn and rows that share a turn's tokens and disagree on them.

    A row may hold the whole turn as context (mask 0), but no part of it; where both rows hold it as the policy's, its
    advantages must be equal. `written` are B tensors (T_b,) bool, `advantages` (B,), B tensors (T_b,) or None.
    """
    for rollout, members in traces(rows).items():
        _, paths = _paths(rows, members)
        for b in members:
            for k, (turn, _) in enumerate(find_turns(written[b])):
                start, end = (len(rows.prompts[b]) + edge for edge in turn)
                for other in members:
                    if other == b or end > len(paths[other]) or paths[b][end - 1] != paths[other][end - 1]:
                        continue
                    where = f"rollouts {rollout!r}: rows {rows.index[b]} and {rows.index[other]} disagree on turn {k}"
                    first = start - len(rows.prompts[other])
                    own = written[other][max(first, 0) : max(end - len(rows.prompts[other]), 0)]
                    if own.any() and not (len(own) == end - start and own.all()):
                        raise ValueError(
                            f"{where} of the former, tokens {tuple(turn)}: the policy wrote all {end - start} there "
                            f"and {int(own.sum())} here; masks of shared tokens must agree, or be 0 on the whole turn"
                        )
                    if own.any() and advantages is not None:
                        ours, theirs = advantages[b], advantages[other]
                        if ours.ndim:
                            ours, theirs = ours[slice(*turn)], theirs[first : first + len(own)]
                        if not torch.allclose(ours.nan_to_num(), theirs.nan_to_num(), rtol=1e-5):
                            raise ValueError(
                                f"{where} of the former, tokens {tuple(turn)}: their advantages are "
                                f"{ours.tolist()!r:.60} and {theirs.tolist()!r:.60}; a shared token has one"
                            )


def with_context(batch: Batch, written: Sequence[Tensor]) -> tuple[Batch, list[int]]:
    """Let rows of a rollout begin where the first of them does, so that turns in a row's prompt are scored in it too.

    What one row holds as context is the policy's if it is so in another. A row that another one continues is scored
    there, and its mask is 0. Returns a batch of rows, advantages and the columns that say how answers are scored, and
    how many tokens each completion has gained in front.
    """
    rows, advantages = batch.rows, batch.advantages
    prompts, completions, masks = list(rows.prompts), list(rows.completions), list(written)
    by_token = None if advantages is None or isinstance(advantages, Tensor) else list(advantages)
    for rollout, members in traces(rows).items():
        tree, paths = _paths(rows, members)
        values = np.zeros((2, tree.num_tokens))  # whether the policy wrote a token, and its advantage
        for b in members:
            own = paths[b][len(rows.prompts[b]) :][written[b].numpy()]
            values[0, own] = 1
            values[1, own] = 0 if by_token is None else by_token[b][written[b]].double().numpy()
        for b in members:
            lengths = {a: len(rows.prompts[a]) for a in members}
            inside = (n for a, n in lengths.items() if n <= lengths[b] and paths[a][n - 1] == paths[b][n - 1])
            whole, start = torch.from_numpy(rows.whole(b)), min(inside)
            prompts[b], completions[b] = whole[:start], whole[start:]
            end, last = len(paths[b]), paths[b][-1]
            longer = [a for a in members if len(paths[a]) > end and paths[a][end - 1] == last]
            if isinstance(advantages, Tensor) and any(advantages[a] != advantages[b] for a in longer):
                other = next(a for a in longer if advantages[a] != advantages[b])
                raise ValueError(
                    f"rollouts {rollout!r}: row {rows.index[other]} continues row {rows.index[b]}, and their "
                    f"advantages are {advantages[other]:g} and {advantages[b]:g}; the former scores the turns of the "
                    "latter, so give the rows of a rollout one advantage"
                )
            masks[b] = torch.from_numpy((values[0, paths[b][start:]] > 0) & (not longer))
            if by_token is not None:
                by_token[b] = torch.from_numpy(values[1, paths[b][start:]]).to(by_token[b].dtype)
    columns = {name: getattr(batch, name) for name in ("rewards", "groups", "probes", "targets")}
    extended = Rows(prompts, completions, rows.index, rows.rollouts)
    own = advantages if by_token is None else by_token
    gained = [new - old for new, old in zip(extended.lengths, rows.lengths, strict=True)]
    return Batch(extended, advantages=own, mask=masks, **columns), gained


def as_sampled(row: Reasoning | None, drop: Tensor, gained: int, own: Tensor) -> tuple[Span | None, list[Span], Tensor]:
    """Give the answer, units and drops of a row in tokens of its completion as sampled, and only those that are there.

    The completion of `row` has `gained` tokens in front; `own` (T,) is true on what the policy wrote as sampled.
    """
    if row is None or not gained:
        return (None, [], drop) if row is None else (row.answer, row.spans, drop)
    kept = [k for k, span in enumerate(row.spans) if span.start >= gained and own[span.start - gained]]
    spans = [Span(row.spans[k].start - gained, row.spans[k].end - gained) for k in kept]
    there = row.answer is not None and row.answer.start >= gained
    answer = Span(row.answer.start - gained, row.answer.end - gained) if there and row.answer else None
    return answer, spans, drop[kept] if len(drop) else drop


def with_relatives(
    weighed: Mapping[int, WeightInputs], nodes: Nodes, rollouts: Sequence[Hashable | None], *, pooled: bool = False
) -> dict[int, WeightInputs]:
    """Let each row be weighed among all units of its rollout; a unit in several rows has the mean of its importances.

    Units of other rows stand behind the row's own tokens, unless all rows are `pooled`: they would count again there.
    """
    sharing = {b: row for b, row in weighed.items() if b in nodes and len(row.importances) == len(row.units)}
    values = defaultdict[Hashable, dict[tuple[int, int], list[float]]](lambda: defaultdict(list))
    sizes, scales = dict[tuple[int, int], int](), defaultdict[Hashable, list[tuple[float, float]]](list)
    for b, row in sharing.items():
        scales[rollouts[b]].append((row.min_spread, row.advantage))
        for unit, value in zip(row.units, row.importances.tolist(), strict=True):
            key = _key(nodes[b], unit)
            values[rollouts[b]][key].append(value)
            sizes[key] = unit.end - unit.start
    joined = dict(weighed)
    for b, row in sharing.items():
        own, known = [_key(nodes[b], unit) for unit in row.units], values[rollouts[b]]
        units, length = list(row.units), row.length
        others = [] if pooled else [key for key in known if key not in own]
        for key in others:
            units.append(Span(length, length + sizes[key]))
            length += sizes[key]
        spreads, advantages = zip(*scales[rollouts[b]], strict=True)
        joined[b] = row._replace(
            importances=torch.tensor([float(np.mean(known[key])) for key in (*own, *others)]),
            units=units,
            length=length,
            min_spread=max(spreads),
            advantage=float(np.mean(advantages)),
        )
    return joined


def _key(nodes: np.ndarray, unit: Span) -> tuple[int, int]:
    return int(nodes[unit.start]), int(nodes[unit.end - 1])


def shared_out(lines: Sequence[Tensor], nodes: Nodes, written: Sequence[Tensor], judged: Sequence[int]) -> list[Tensor]:
    """Give every token that the policy wrote in `judged` rows the mean of `lines`, B tensors (T_b,), over them."""
    result, masks = list(lines), {b: written[b].numpy() for b in nodes}
    own = [b for b in judged if b in nodes]
    if not own:
        return result
    places = np.concatenate([nodes[b][masks[b]] for b in own])
    size = 1 + max(int(row.max(initial=0)) for row in nodes.values())
    counts = np.bincount(places, minlength=size)
    sums = np.bincount(places, np.concatenate([lines[b].double().numpy()[masks[b]] for b in own]), size)
    for b, row in nodes.items():
        known = counts[row] > 0
        mean = torch.from_numpy(sums[row] / np.maximum(counts[row], 1)).to(lines[b].dtype)
        result[b] = torch.where(torch.from_numpy(known), mean, lines[b])
    return result


class Sharing(NamedTuple):
    """Counts of what the rows of rollouts share."""

    tokens: int  # of all rows, prompts included
    tokens_saved: int  # of those, that stand in another row of the rollout too, at the same place after the same text
    merge_compression_ratio: float  # turns of the policy for each row, each counted once, as in rllm
    retokenized: list[tuple[int, int, int]]  # row, an earlier row, and the token from which only their ids differ

    def metrics(self) -> dict[str, float]:
        """Give figures to log."""
        return {
            "rollouts/tokens_saved": float(self.tokens_saved),
            "rollouts/merge_compression_ratio": self.merge_compression_ratio,
            "rollouts/retokenized": float(len(self.retokenized)),
        }


def rollout_sharing(rows: Rows, mask: Sequence[Tensor], tokenizer: Any) -> Sharing:
    """Count what the rows of each rollout share, and find where a new tokenization of the same text ended it.

    `mask` are B tensors (T_b,), 1 on tokens that the policy wrote. Tokens are counted from the prompt's first.
    """
    total, saved, retokenized, turns = 0, 0, list[tuple[int, int, int]](), set[tuple[int, int]]()
    nodes = shared_nodes(rows)
    for b in range(len(rows)):
        total += len(rows.whole(b))
        places = nodes.get(b, -1 - np.arange(rows.lengths[b]) - total)  # a row by itself shares no number
        turns |= {_key(places, turn.written) for turn in find_turns(mask[b])}
    for members in traces(rows).values():
        tree = PrefixTree()
        for i, b in enumerate(members):
            tokens = rows.whole(b)
            shared = tree.common_prefix(tokens)
            saved += shared
            tree.insert(tokens)
            for other in members[:i]:
                before = rows.whole(other)
                same = np.array_equal(before[:shared], tokens[:shared])
                if same and _retokenized(tokens[shared:], before[shared:], tokenizer):
                    retokenized.append((b, other, shared))
                    break
    return Sharing(total, saved, len(turns) / max(len(rows), 1), retokenized)


def _retokenized(ids: np.ndarray, others: np.ndarray, tokenizer: Any) -> bool:
    """Whether two continuations begin with the same text, at least to the end of both first tokens."""
    if not len(ids) or not len(others):
        return False
    ours, theirs = (decoded(row[:_COMPARED].tolist(), tokenizer) for row in (ids, others))
    first = max(len(decoded([int(row[0])], tokenizer)) for row in (ids, others))
    return 0 < first <= len(ours) and ours[:first] == theirs[:first]
