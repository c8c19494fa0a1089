"""Connect credit to any trainer: fold weights into advantages, and credit rows whose model is in other processes."""

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from .. import CounterfactualConfig, Credit, counterfactual_credit, packed_logprobs
from ..credit.units import unpad
from ..estimators.base import ANSWER, ENTROPIES, EXTERNAL, NEEDS, REWARDS, SIBLINGS, Estimator
from ..estimators.registry import ESTIMATORS
from ..hf.model import causal_lm
from ..hf.modes import evaluation_mode
from ..scoring.access import DISTRIBUTIONS, GRADIENTS, LOGPROBS, MODEL, ModelAccess, Sharded


class Draws:
    """Random generators of credit, one per batch, which a resumed run makes again.

    They depend on the seed, the process, the step, and the number of earlier batches of that step. A resumed run knows
    all of these, so nothing needs to be saved.
    """

    def __init__(self, seed: int, process: int = 0) -> None:
        self.key, self._step, self._before = (seed, process), -1, 0

    def of(self, step: int) -> torch.Generator:
        """Make the generator, on the CPU, of the next batch of `step`; call it once for each batch."""
        self._before = self._before + 1 if step == self._step else 0
        self._step = step
        text = repr((*self.key, step, self._before)).encode()
        return torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))


def fold_weights(advantages: Tensor, weights: Tensor) -> Tensor:
    """Multiply advantages by token weights: for weights >= 0 the same as weighing the clipped loss of each token.

    That holds because `min(r * A, clip(r) * A) * w = min(r * A * w, clip(r) * A * w)`; a KL term is added to the
    loss elsewhere and stays as it is, and tokens of weight 0 stay in every denominator, which count the mask.

    Args:
        advantages: (B,) or (B, T), float.
        weights: (B, T), finite and >= 0.

    Returns:
        (B, T) in advantages' dtype; `advantages` itself if every weight is 1, so that a host's own arithmetic is
        bitwise unchanged.

    Raises:
        ValueError: shapes that do not fit; a weight that is negative or not finite, naming row, token and value.
    """
    if weights.dim() != 2 or advantages.shape not in (weights.shape, weights.shape[:1]):
        raise ValueError(
            f"advantages must be (B,) or (B, T) for weights (B, T), got {tuple(advantages.shape)} and "
            f"{tuple(weights.shape)}"
        )
    bad = ~(torch.isfinite(weights) & (weights >= 0))
    if bad.any():
        row, token = bad.nonzero()[0].tolist()
        raise ValueError(f"weights must be finite and >= 0; row {row}, token {token} is {weights[row, token].item()}")
    if (weights == 1).all():
        return advantages
    columns = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)
    return columns * weights.to(columns)


def credited_advantages(advantages: Tensor, credit: Credit) -> Tensor:
    """Apply credit to `advantages` (B,) or (B, T), for a host to train on: (B, T) in their dtype.

    Multiplies them by the weights; signed credit replaces them. Raises as `fold_weights`.
    """
    folded = fold_weights(advantages if credit.advantages is None else credit.advantages, credit.weights)
    return folded.to(advantages)


def token_entropies(
    model: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    *,
    temperature: float = 1.0,
    token_budget: int | None = None,
) -> Tensor:
    """Compute the entropy (nats) that each token of a padded batch was drawn with, by one packed forward.

    The model runs in evaluation mode, as in scoring: without dropout or noise of training.

    Args:
        model: as in `packed_logprobs`.
        prompt_ids, prompt_mask, completion_ids, completion_mask: as in `counterfactual_credit`.
        temperature, token_budget: as in `packed_logprobs`.

    Returns:
        (B, T) fp32 on the host, 0 on padding.
    """
    prompts = unpad("prompt", prompt_ids, prompt_mask, left=True)
    completions = unpad("completion", completion_ids, completion_mask, left=False)
    with evaluation_mode(causal_lm(model)):
        _, found = packed_logprobs(
            model, prompts, completions, temperature=temperature, return_entropy=True, token_budget=token_budget
        )
    assert isinstance(found, list)
    return padded_entropies(found, completion_ids.shape)


def padded_entropies(rows: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Pad B tensors (T_b,) with 0 to `shape`, (B, T) fp32 on the host."""
    padded = torch.zeros(tuple(shape))
    for row, line in zip(rows, padded, strict=True):
        line[: len(row)] = row
    return padded


def weighed_text(tokenizer: Any, token_ids: Tensor, values: Tensor, plain: float) -> str:
    """Describe which tokens of a completion were weighed, for a table that people read.

    Args:
        tokenizer: the one that sampled the ids.
        token_ids: (T,) int64.
        values: (T,) float, the weight or advantage of each token.
        plain: the value of tokens that were not weighed; those are left out.

    Returns:
        Runs of neighbours of one value, each followed by that value: "3 + 4 = 7. (4.00) | #### 7 (1.50)".
    """
    found = []
    kept, counts = values.unique_consecutive(return_counts=True)
    for value, run in zip(kept.tolist(), token_ids.split(counts.tolist()), strict=True):
        if value != plain:
            found.append(f"{tokenizer.decode(run).strip()} ({value:.2f})")
    return " | ".join(found)


def pad_rows(rows: Sequence[Tensor], side: str = "right") -> tuple[Tensor, Tensor]:
    """Pad rows of any length into one tensor.

    Args:
        rows: B tensors of one dtype, 1-D each, at least one.
        side: side of the padding, `right` or `left`.

    Returns:
        (B, longest) padded with 0, and the mask (B, longest) of what is real, both in the rows' dtype.

    Raises:
        ValueError: there are no rows, or one is not a 1-D tensor.
    """
    if not len(rows):
        raise ValueError("rows: the batch is empty; expected at least one tensor")
    for b, row in enumerate(rows):
        if not isinstance(row, Tensor) or row.ndim != 1:
            got = f"shape {tuple(row.shape)}" if isinstance(row, Tensor) else type(row).__name__
            raise ValueError(f"rows[{b}]: must be a 1-D tensor, got {got}")
    ids, mask = (
        torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True, padding_side=side)
        for tensors in (rows, [torch.ones_like(row) for row in rows])
    )
    return ids, mask


OFFERED_BY_A_SERVICE = frozenset({ANSWER, SIBLINGS, REWARDS, LOGPROBS})
"""Names of `NEEDS` offered by a host that gives only log-probs of sampled tokens of its model."""

OFFERS = {
    "TRL": frozenset(NEEDS) - {EXTERNAL},
    "TRL, FSDP": frozenset(NEEDS) - {EXTERNAL, GRADIENTS},
    "verl": OFFERED_BY_A_SERVICE | {ENTROPIES} | Sharded.capabilities,
    "verl, by log-prob requests": OFFERED_BY_A_SERVICE | {ENTROPIES},
    "OpenRLHF": OFFERED_BY_A_SERVICE | Sharded.capabilities,
    "OpenRLHF, by log-prob requests": OFFERED_BY_A_SERVICE,
    "your loop, `InProcess` or `TrainingForward`": frozenset(NEEDS),
    "your loop, `Sharded`": frozenset(NEEDS) - {GRADIENTS},
    "your loop, `LogprobService`": frozenset(NEEDS) - {DISTRIBUTIONS, MODEL, GRADIENTS},
}
"""Names of `NEEDS` that each host offers; refusals and the table in docs/other_trainers.md derive from it."""


Case = tuple[object, str]
"""Condition under which a feature and a host cannot be combined, and the sentence that says so."""


ONE_RATIO = "a completion has one ratio there, so that only the sum of its tokens' weights acts"


def sentences(cases: Iterable[Case]) -> list[str]:
    """Keep the sentences of the cases whose condition holds."""
    return [sentence for holds, sentence in cases if holds]


def refuse(cases: Iterable[Case], what: str = "counterfactual credit") -> None:
    """Raise `NotImplementedError` that names all that `what` cannot be combined with, if any case holds."""
    if names := sentences(cases):
        raise NotImplementedError(f"{what} cannot be combined with " + "; nor with ".join(names))


def unmet_needs(config: CounterfactualConfig, offers: Collection[str]) -> list[Case]:
    """Make a case of each thing that `config` needs and `offers`, names of `NEEDS`, lacks.

    A sentence begins with the option that needs it and its value, and ends with a remedy.
    """
    return [(True, _sentence(need, config.estimator, offers)) for need in sorted(config.needs - set(offers))]


def _sentence(need: str, estimator: Estimator, offers: Collection[str]) -> str:
    causes = _options_that_need(need, estimator)
    does, instead = ("each needs", "leave them out") if len(causes) > 1 else ("it needs", "leave it out")
    if not causes:
        causes = [f"estimator={estimator.name!r}"]
        able = [name for name, kind in ESTIMATORS.items() if kind().needs <= set(offers)]
        instead = _INSTEAD.get(need, f"take one of {', '.join(able)}")
    return f"{' and '.join(causes)}: {does} {NEEDS[need]}, which this trainer does not give; {instead}"


_INSTEAD = {
    EXTERNAL: "give a function (model, ScoredBatch) -> Importances for estimator",
    SIBLINGS: "sample more than one completion of each prompt",
}
"""Remedies for needs that another estimator would not remove."""


def _options_that_need(missing: str, estimator: Estimator) -> list[str]:
    """Find the fewest options of an estimator without which it would not need `missing`; none where it always does."""
    kind: Any = type(estimator)
    usual = {entry.name: entry.default for entry in fields(kind)}
    changed = [name for name in usual if getattr(estimator, name) != usual[name]]
    for size in range(1, len(changed) + 1):
        for names in combinations(changed, size):
            try:
                without: Any = replace(estimator, **{name: usual[name] for name in names})  # type: ignore[type-var]
            except ValueError:  # another option is read only together with this one
                continue
            if missing not in without.needs:
                return [f"{name}={getattr(estimator, name)!r}" for name in names]
    return []


def credit_rows(
    tokenizer: Any,
    prompts: Sequence[Tensor],
    completions: Sequence[Tensor],
    counted: Sequence[Tensor],
    advantages: Sequence[Tensor],
    access: ModelAccess,
    *,
    config: CounterfactualConfig,
    generator: torch.Generator,
    groups: Tensor,
    rewards: Tensor,
    entropies: Sequence[Tensor] | None = None,
) -> tuple[list[Tensor], dict[str, float]]:
    """Credit a batch of rows whose model is in other processes.

    Args:
        tokenizer, config, generator: as in `counterfactual_credit`.
        prompts, completions: B 1-D int64 tensors.
        counted: B tensors (T_b,), 1 on tokens that are trained on, 0 on others, such as a tool's.
        advantages: B tensors (T_b,), float. Where each row has a single advantage, estimators that compare rewards with
            advantages get (B,).
        access: the host's log-prob service or its workers.
        groups: (B,) int64, equal for completions that are compared with each other.
        rewards: (B,) float.
        entropies: B tensors (T_b,), nats.

    Returns:
        B tensors (T_b,) in the advantages' dtype, to train on; tokens that do not count keep theirs. And the
        figures to log.

    Raises:
        ValueError, NotImplementedError: as `counterfactual_credit`.
    """
    mask, own = pad_rows(counted)[0], pad_rows(advantages)[0]
    credit = counterfactual_credit(
        access,
        tokenizer,
        *pad_rows(prompts, "left"),
        *pad_rows(completions),
        advantages=_of_rows(own * mask, mask.long()),
        config=config,
        generator=generator,
        groups=groups,
        rewards=rewards,
        entropies=None if entropies is None else pad_rows(entropies)[0],
    )
    credited = torch.where(mask.bool(), credited_advantages(own, credit), own)
    return [row[: len(mine)] for row, mine in zip(credited, advantages, strict=True)], credit.metrics(mask)


def _of_rows(advantages: Tensor, mask: Tensor) -> Tensor:
    """Reduce (B, T) advantages, 0 outside of `mask`, to (B,) if each row has one value inside; else keep them."""
    first = advantages.gather(1, mask.argmax(1, keepdim=True))
    return first[:, 0] if torch.equal(advantages, first * mask) else advantages
