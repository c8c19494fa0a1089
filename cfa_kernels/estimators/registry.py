"""What finds the importance of each unit of a completion: every estimator behind one signature.

`credit.py` lays a `CreditBatch` out and turns the `Importances` that come back into weights or token advantages; the
work itself is done by the rooms below, one for each way of looking at a completion.
"""

from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ..scoring.masked import CounterfactualScores
from ..scoring.outcomes import Outcome
from .base import CreditBatch, EstimatorKind, Importances
from .gradient import gradient_saliency
from .partial_branches import answer_knockout, short_branches
from .prefix_gain import prefix_gain as gains_of_prefixes
from .preselection import CHEAP_ESTIMATES, cheap_estimates, preselected_masking
from .probes import own_probe
from .resampling import resampled_scores
from .siblings import ktae_values, prefix_tree_values, sibling_edits
from .total_effects import total_effects

_Column = TypeVar("_Column")


def masking(
    model: nn.Module,
    batch: CreditBatch,
    *,
    outcome: Outcome = "logprob",
    effect: str = "direct",
    fill: str = "placeholder",
    samples: int = 1,
    approximation: str | None = None,
    preselect: float = 1.0,
    cheap: str = "length",
) -> Importances:
    """Mask each unit and see how the answer moves (CF paper, eq. 3; with tokens for units the OAR paper's OAR-P).

    Exact with placeholders, unless `approximation` or `preselect` says otherwise; see `approximations.py`. What passes
    through later units counts where the `effect` is "total", see `mediation.py`.
    """
    if effect == "total":
        return _total_masking(model, batch)
    score = _masked_by(batch, fill, samples, approximation)
    options: dict[str, Any] = {"outcome": outcome, "token_budget": batch.token_budget}
    if preselect < 1:
        estimate = _cheaply(model, batch, cheap)
        some = preselected_masking(
            model, batch.prompts, batch.completions, batch.units, batch.answers, [row.abs() for row in estimate.values],
            share=preselect, cheap_work=estimate.work, score=score, **options,
        )  # fmt: skip
        scores = CounterfactualScores(some.base, [], [-row for row in some.importance], None, some.work)
    else:
        scores = score(model, batch.prompts, batch.completions, batch.units, batch.answers, **options)
    flat = -torch.cat([torch.zeros(0), *(row.detach().float().cpu() for row in scores.drop)])
    values = list(flat.split([len(row) for row in scores.drop]))
    return Importances(values, work=scores.work, scores=scores)


def _total_masking(model: nn.Module, batch: CreditBatch) -> Importances:
    if batch.elsewhere:
        raise NotImplementedError("effect='total' needs the model in this process, and it lies in others")
    assert batch.placeholder_id is not None
    found = total_effects(
        model, batch.prompts, batch.completions, batch.units, batch.answers, placeholder_id=batch.placeholder_id,
        token_budget=batch.token_budget, ask=batch.ask,
    )  # fmt: skip
    masked = [base - row for base, row in zip(found.base, found.direct, strict=True)]
    direct = CounterfactualScores(found.base, masked, [-row for row in found.direct], None, found.work)
    return Importances(found.total, work=found.work, scores=direct)


def _masked_by(
    batch: CreditBatch, fill: str, samples: int, approximation: str | None
) -> Callable[..., CounterfactualScores]:
    """What masks and scores, with the arguments of `score_counterfactuals` but for the placeholder."""
    if approximation is None and fill == "placeholder":
        return partial(_host_scores, batch)
    if batch.elsewhere:
        what = f"approximation={approximation!r}" if approximation else f"fill={fill!r}"
        raise NotImplementedError(f"{what} needs the model in this process, and it lies in others")
    if approximation is not None and fill != "placeholder":
        raise ValueError(f"fill={fill!r} cannot be combined with approximation={approximation!r}")
    if approximation == "short_branches":
        assert batch.placeholder_id is not None
        return partial(short_branches, placeholder_id=batch.placeholder_id, fed_from=batch.reasoning_ends)
    if approximation == "knockout":
        return partial(answer_knockout, blind_from=batch.reasoning_ends)
    seed = 0 if batch.generator is None else int(torch.randint(2**62, (), generator=batch.generator))
    return partial(resampled_scores, seed=seed, samples=samples)


def _host_scores(batch: CreditBatch, *rows: Any, outcome: str, **options: Any) -> CounterfactualScores:
    if outcome != "logprob":  # a host's scorer may know this one alone
        options["outcome"] = outcome
    return batch.score(*rows, placeholder_id=batch.placeholder_id, **options)


def _cheaply(model: nn.Module, batch: CreditBatch, name: str) -> Importances:
    """What chooses the units that are worth masking."""
    if name in CHEAP_ESTIMATES:
        return Importances(cheap_estimates(name, batch.units))
    if name in APPROXIMATIONS:
        return masking(model, batch, approximation=name)
    return ESTIMATORS[name].run(model, batch)


def gradient(
    model: nn.Module, batch: CreditBatch, *, outcome: Outcome = "mean", sigma: float = 1e-3, samples: int = 1
) -> Importances:
    """Gradient of the outcome's change under noise, times the embeddings (OAR paper, OAR-G)."""
    if batch.elsewhere:
        raise NotImplementedError("estimator='gradient' needs the model in this process, and it lies in others")
    values, work = gradient_saliency(
        model, batch.prompts, batch.completions, batch.units, batch.answers, outcome=outcome, sigma=sigma,
        samples=samples, generator=batch.generator, token_budget=batch.token_budget,
    )  # fmt: skip
    return Importances(values, work=work)


def prefix_gain(model: nn.Module, batch: CreditBatch) -> Importances:
    """What each unit adds to the probability of the answer, asked right behind it (IGPO 2510.14967, PACR 2510.22255).

    The probe is the completion's own marker and answer, from the end of the reasoning on.
    """
    probes = [
        own_probe(completion, answer, end) if answer is not None and units else None
        for completion, answer, end, units in zip(
            batch.completions, batch.answers, batch.reasoning_ends, batch.units, strict=True
        )
    ]
    values, work = gains_of_prefixes(
        model, batch.prompts, batch.completions, batch.units, probes, token_budget=batch.token_budget,
        score=batch.score if batch.elsewhere else None, ask=batch.ask,
    )  # fmt: skip
    return Importances(values, work=work)


def prefix_tree(model: nn.Module, batch: CreditBatch) -> Importances:
    """What each token does to the mean reward of those who share the prefix (TEMPO / P2T, 2509.18314); signed.

    In the units of the advantages where those are (B,): rewards that a group's standard deviation has divided there
    are divided by it here. Else in the units of the rewards.
    """
    groups, rewards = _siblings(batch), _rewards(batch)
    values = prefix_tree_values(batch.sampled, groups, rewards)
    scales = _scales(groups, rewards, batch.advantages)
    return Importances(unit_means([row * scale for row, scale in zip(values, scales, strict=True)], batch), signed=True)


def _scales(groups: Tensor, rewards: Tensor, advantages: Tensor | None) -> list[float]:
    """For each row how much wider its group's advantages (B,) lie than its rewards; 1 where that cannot be told."""
    scales = torch.ones(len(groups), dtype=torch.float64)
    if advantages is None or advantages.ndim != 1:
        return scales.tolist()
    for group in groups.unique():
        inside = groups == group
        wide, narrow = (x[inside].double().max() - x[inside].double().min() for x in (advantages, rewards))
        if narrow > 0 and wide > 0:
            scales[inside] = wide / narrow
    return scales.tolist()


def ktae(model: nn.Module, batch: CreditBatch) -> Importances:
    """How strongly a token goes with correct completions of its group (KTAE); signed."""
    values = ktae_values(batch.sampled, _siblings(batch), _correct(batch), ignored=batch.ignored_ids)
    return Importances(unit_means(values, batch), signed=True)


def edits(model: nn.Module, batch: CreditBatch) -> Importances:
    """1 where a wrong completion differs from its nearest correct sibling; after IBPO, without a correction of its own.

    Completions that are correct, or have no correct sibling, get 1 throughout.
    """
    values = sibling_edits(batch.sampled, _siblings(batch), _correct(batch))
    return Importances(unit_means(values, batch))


def _siblings(batch: CreditBatch) -> Tensor:
    """The groups; raises `ValueError` where no completion has another one to be compared with."""
    if batch.groups is None or len(batch.groups.unique()) == len(batch.groups):
        raise ValueError("groups: no two completions are of one group, so there is nothing to compare them with")
    return batch.groups


def _rewards(batch: CreditBatch) -> Tensor:
    if batch.rewards is None:
        raise ValueError("rewards must be given to an estimator that compares completions, got None")
    return batch.rewards


def _correct(batch: CreditBatch) -> Tensor:
    rewards = _rewards(batch)
    if (bad := (~torch.isfinite(rewards)).nonzero()).numel():
        raise ValueError(f"rewards row {int(bad[0])}: must be finite, got {rewards[int(bad[0])].item()}")
    return rewards >= batch.correct_threshold


def entropy(model: nn.Module, batch: CreditBatch) -> Importances:
    """The entropy of each token's distribution, averaged over a unit (2506.01939)."""
    return Importances(unit_means(_given("entropies", batch.entropies), batch))


def external(model: nn.Module, batch: CreditBatch) -> Importances:
    """The caller's own numbers, one per unit or one per token: process rewards, attention, a teacher's opinion."""
    given = _given("external", batch.external)
    values = []
    for b, (row, units, length) in enumerate(zip(given, batch.units, batch.lengths, strict=True)):
        row = as_numbers(row, f"external row {b}", f"{len(units)} units or {length} tokens")
        if len(row) == len(units):
            values.append(row)
        elif len(row) == length:
            values += unit_means([row], batch, rows=[b])
        else:
            raise ValueError(
                f"external row {b}: must hold a number for each of {len(units)} units or {length} tokens, got "
                f"{len(row)}"
            )
    return Importances(values)


def as_numbers(given: Any, what: str, count: str) -> Tensor:
    """A 1-D tensor, an array or a list of numbers as a tensor, fp32 on the host.

    Raises `ValueError` beginning with `what`: `count` says of what there should be a number each.
    """
    if isinstance(given, Tensor | np.ndarray):
        row = torch.as_tensor(given)
        if row.ndim == 1 and not row.is_complex():
            return row.detach().float().cpu()
        raise ValueError(f"{what}: gave shape {tuple(row.shape)} of {row.dtype}, expected a number for each of {count}")
    if not isinstance(given, list | tuple):
        raise ValueError(
            f"{what}: expected a tensor or a list with a number for each of {count}, got {type(given).__name__}"
        )
    for i, number in enumerate(given):
        try:
            known: float | None = float(number)
        except (TypeError, ValueError, OverflowError):
            known = None
        if known is None or not isinstance(number, Real | Tensor | np.ndarray):
            raise ValueError(f"{what}[{i}]: expected a number that a float holds, got a {type(number).__name__}")
    return torch.tensor([float(number) for number in given], dtype=torch.float32)


def unit_means(tokens: Sequence[Tensor], batch: CreditBatch, rows: Sequence[int] | None = None) -> list[Tensor]:
    """Values of tokens, (T_b,) a row, averaged over each unit: (K_b,) a row. `rows` are theirs; default all."""
    means = []
    for b, row in zip(range(len(batch.lengths)) if rows is None else rows, tokens, strict=True):
        if row.shape != (batch.lengths[b],):
            raise ValueError(f"row {b}: needs a number for each of {batch.lengths[b]} tokens, got {tuple(row.shape)}")
        sums = torch.cat([torch.zeros(1, dtype=torch.float64), row.detach().double().cpu().cumsum(0)])
        edges = torch.tensor([tuple(unit) for unit in batch.units[b]], dtype=torch.int64).reshape(-1, 2)
        means.append(((sums[edges[:, 1]] - sums[edges[:, 0]]) / (edges[:, 1] - edges[:, 0])).float())
    return means


def _given(name: str, column: list[_Column] | None) -> list[_Column]:
    if column is None:
        raise ValueError(f"{name} must be given to an estimator that reads them, got None")
    return column


ESTIMATORS: dict[str, EstimatorKind] = {
    "masking": EstimatorKind(
        masking,
        "spans",
        "range",
        True,
        False,
        True,
        ("outcome", "effect", "fill", "samples", "approximation", "preselect", "cheap"),
    ),
    "gradient": EstimatorKind(gradient, "tokens", "bilevel", True, False, True, ("outcome", "sigma", "samples")),
    "prefix_gain": EstimatorKind(prefix_gain, "spans", "range", True, False, True),
    "entropy": EstimatorKind(entropy, "tokens", "top", False, False, False),
    "prefix_tree": EstimatorKind(prefix_tree, "tokens", "identity", False, True, False, signed=True),
    "ktae": EstimatorKind(ktae, "tokens", "identity", False, True, False, signed=True),
    "sibling_edits": EstimatorKind(edits, "tokens", "identity", False, True, False),
    "external": EstimatorKind(external, "spans", "range", False, False, False),
}

APPROXIMATIONS = ("short_branches", "knockout")
"""Of masking: what is computed anew for a branch. See `partial_branches.py`."""

SELECTORS = (*CHEAP_ESTIMATES, *APPROXIMATIONS, "prefix_gain", "gradient", "entropy")
"""What may choose the units that are masked exactly."""
