"""Score tokens by comparing the completions of one prompt: their token ids and their rewards, without a model.

A completion that shares its prompt with no other has nothing to be compared with and gets the neutral value: 0 where
values are added to an advantage, 1 where they multiply it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from ..batch import Batch
from ..options import Finite, check_fields
from ..rows import check_finite
from ..scoring.access import ModelAccess
from .base import REWARDS, SIBLINGS, Estimator, Importances, required, unit_means

# Sums of equal rewards in another order differ by rounding, by less than this relative to the largest reward.
_EQUAL = 1e-12


@dataclass(frozen=True)
class PrefixTreeValues(Estimator):
    """Change by each token of the mean reward of completions that share the prefix (TEMPO / P2T, 2509.18314); signed.

    Values are on the scale of advantages (B,): if those were divided by a group's standard deviation, so are the
    rewards here. Other advantages leave them on the scale of the rewards.
    """

    name = "prefix_tree"
    default_units = "tokens"
    weights = None
    negative = True
    needs = frozenset({SIBLINGS, REWARDS})

    def __call__(self, access: ModelAccess, batch: Batch) -> Importances:
        """Score the units of a batch; queries no model."""
        groups, rewards = required("groups", batch.groups), _rewards(batch)
        values = prefix_tree_values(batch.rows.completions, groups, rewards)
        scales = _scales(groups, rewards, batch.advantages)
        return Importances(unit_means([x * scale for x, scale in zip(values, scales, strict=True)], batch), signed=True)


@dataclass(frozen=True)
class SiblingEdits(Estimator):
    """Mark of the tokens in which a wrong completion differs from its nearest correct sibling; of all without one.

    After IBPO (arXiv 2605.16302), which credits the tokens that the policy edits when it corrects a wrong completion.
    """

    name = "sibling_edits"
    default_units = "tokens"
    weights = "identity"
    needs = frozenset({SIBLINGS, REWARDS})

    correct_threshold: Finite = 0.5
    """A completion with at least this reward counts as correct."""

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, access: ModelAccess, batch: Batch) -> Importances:
        """Score the units of a batch; queries no model."""
        groups, correct = required("groups", batch.groups), _rewards(batch) >= self.correct_threshold
        values = sibling_edits(batch.rows.completions, groups, correct)
        return Importances(unit_means(values, batch))


def _rewards(batch: Batch) -> Tensor:
    """Return the rewards; raise `ValueError` naming the row of one that is not finite."""
    rewards = required("rewards", batch.rewards)
    check_finite("rewards", batch.index, rewards)
    return rewards


def _scales(groups: Tensor, rewards: Tensor, advantages: Tensor | list[Tensor] | None) -> list[float]:
    """Find the ratio of spread of advantages (B,) to rewards in each row's group; 1 where it cannot be found."""
    scales = [1.0] * len(groups)
    if not isinstance(advantages, Tensor):
        return scales
    for rows in _members(groups):
        wide, narrow = (x[rows].double().max() - x[rows].double().min() for x in (advantages, rewards))
        if narrow > 0 and wide > 0:
            for b in rows:
                scales[b] = (wide / narrow).item()
    return scales


def prefix_tree_values(completions: Sequence[Tensor], groups: Tensor, rewards: Tensor) -> list[Tensor]:
    """Compute the change by each token of the mean reward of completions that share the prefix, B tensors (T_b,) fp32.

    With V(s) the mean reward of a group's completions that begin with s, token t gets V(y_1..y_t) - V(y_1..y_(t-1)):
    only branching tokens get anything. If a completion is a prefix of another, the other's next token is a branching
    token, but the end of the shorter one is not, unless an end-of-text token is part of it.
    """
    ids, scores = [row.numpy() for row in completions], rewards.double().numpy()
    values = [np.zeros(len(row)) for row in ids]
    for rows in _members(groups):
        common = _shared_prefixes([ids[b] for b in rows])  # (G, G)
        reward = scores[rows]
        for i, b in enumerate(rows):
            # Entry t counts, and sums the rewards of, the completions that share at least t tokens with this one.
            count, total = (
                np.bincount(common[i], weights, minlength=len(ids[b]) + 1)[::-1].cumsum()[::-1]
                for weights in (None, reward)
            )
            step = np.diff(total / count)
            values[b] = np.where(np.abs(step) > _EQUAL * np.abs(reward).max(), step, 0.0)
    return [torch.from_numpy(row.astype(np.float32)) for row in values]


def sibling_edits(completions: Sequence[Tensor], groups: Tensor, correct: Tensor) -> list[Tensor]:
    """Mark by 1 the tokens in which a wrong completion differs from its nearest correct sibling, the others by 0.

    Correct completions and those without a correct sibling get 1 throughout; `correct` is (B,) bool.
    """
    siblings = correct_siblings(completions, groups, correct)
    return [
        edited_tokens(row, completions[near[0]]) if near else torch.ones(len(row))
        for row, near in zip(completions, siblings, strict=True)
    ]


def correct_siblings(completions: Sequence[Tensor], groups: Tensor, correct: Tensor) -> list[list[int]]:
    """Find the correct completions of each wrong one's group, by rising edit distance over tokens; none for others.

    Of equally near ones the lower ids come first, so that the batch's order decides nothing.
    """
    right, siblings, ids = correct.tolist(), [list[int]() for _ in completions], [row.tolist() for row in completions]
    for rows in _members(groups):
        sources = [b for b in rows if right[b]]
        for b in (b for b in rows if not right[b]):
            keys = {n: (Levenshtein.distance(ids[b], ids[n]), ids[n]) for n in sources}
            siblings[b] = sorted(sources, key=keys.__getitem__)
    return siblings


def edited_tokens(completion: Tensor, corrected: Tensor) -> Tensor:
    """Mark by 1 the tokens of `completion` that an alignment with `corrected` finds edited, the others by 0.

    A substituted or deleted token counts as edited, and so does the token before which something is inserted; an
    insertion at the end counts for the last token. Takes (T,) and (S,) int64 on the host; returns (T,).
    """
    edited = torch.zeros(len(completion))
    edits = Levenshtein.editops(completion.tolist(), corrected.tolist())
    if len(edited) and len(edits):
        edited[[min(edit.src_pos, len(edited) - 1) for edit in edits]] = 1
    return edited


def _members(groups: Tensor) -> list[list[int]]:
    """List the rows of each group."""
    return [(groups == group).nonzero().flatten().tolist() for group in groups.unique()]


def _shared_prefixes(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Count the first tokens that each two of G rows have in common, (G, G)."""
    common = np.diag([len(row) for row in rows])
    for i, one in enumerate(rows):
        for j, other in enumerate(rows[:i]):
            length = min(len(one), len(other))
            differs = one[:length] != other[:length]
            common[i, j] = common[j, i] = int(differs.argmax()) if differs.any() else length
    return common
