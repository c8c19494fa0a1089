"""What every trainer needs of credit: folding weights into advantages, and credit where the model is elsewhere."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import (
    CounterfactualConfig,
    CounterfactualScores,
    Credit,
    ScoringWork,
    Span,
    counterfactual_credit,
    packed_logprobs,
)
from ..estimators.registry import APPROXIMATIONS
from ..hf.model import causal_lm
from ..hf.modes import evaluation_mode
from ..hf.verify import FLOAT32_NOISE
from ..scoring.outcomes import DIVERGENCES

LogprobsOf = Callable[[list[Tensor], list[Tensor]], Sequence[Tensor]]
"""Prompts and completions, lists of 1-D int64 tensors, to the log-prob (nats) of each completion token, 1-D each."""


class Draws:
    """Sources of the numbers that credit draws: of each batch one, which a resumed run finds again.

    They follow from what a run that is resumed knows, so that nothing need be saved: seed, process, step, and how many
    batches of that step came before.
    """

    def __init__(self, seed: int, process: int = 0) -> None:
        self.key, self._step, self._before = (seed, process), -1, 0

    def of(self, step: int) -> torch.Generator:
        """A generator on the CPU for the next batch of `step`; call it once for each batch."""
        self._before = self._before + 1 if step == self._step else 0
        self._step = step
        text = repr((*self.key, step, self._before)).encode()
        return torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))


def fold_weights(advantages: Tensor, weights: Tensor) -> Tensor:
    """Advantages times token weights: for weights >= 0 the same as weighing the clipped loss of each token.

    That holds because `min(r * A, clip(r) * A) * w = min(r * A * w, clip(r) * A * w)`; a KL term is added to the
    loss elsewhere and stays as it is, and tokens of weight 0 stay in every denominator, which count the mask.

    Args:
        advantages: (B,) or (B, T), float.
        weights: (B, T), finite and >= 0.

    Returns:
        (B, T) in advantages' dtype; `advantages` itself if every weight is 1, so that a host's arithmetic stays
        its own to the last bit.

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
    """What a host trains on in place of `advantages` (B,) or (B, T): (B, T) in their dtype.

    Times the weights, or, where credit is signed, what it made of them. Raises as `fold_weights`.
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
    """Entropy (nats) of the distribution that each token of a padded batch was drawn from, by one packed forward.

    The model runs in evaluation mode, as where answers are scored: dropout and noise of training have no part in it.

    Args:
        model: as in `packed_logprobs`.
        prompt_ids, prompt_mask, completion_ids, completion_mask: as in `counterfactual_credit`.
        temperature, token_budget: as in `packed_logprobs`.

    Returns:
        (B, T) fp32 on the host, 0 on padding.
    """
    prompts, completions = (
        [row[kept.bool()].cpu() for row, kept in zip(ids, mask, strict=True)]
        for ids, mask in ((prompt_ids, prompt_mask), (completion_ids, completion_mask))
    )
    with evaluation_mode(causal_lm(model)):
        _, found = packed_logprobs(
            model, prompts, completions, temperature=temperature, return_entropy=True, token_budget=token_budget
        )
    padded = torch.zeros(completion_ids.shape)
    for row, line in zip(found, padded, strict=True):
        line[: len(row)] = row
    return padded


def weighed_text(tokenizer: Any, token_ids: Tensor, values: Tensor, plain: float) -> str:
    """Describe which tokens of a completion were weighed, for a table that people read.

    Args:
        tokenizer: the one that sampled the ids.
        token_ids: (T,) int64.
        values: (T,) float, what each token was given.
        plain: what a token is given that was not weighed; such tokens are left out.

    Returns:
        Runs of neighbours of one value, each with that value behind it: "3 + 4 = 7. (4.00) | #### 7 (1.50)".
    """
    found = []
    kept, counts = values.unique_consecutive(return_counts=True)
    for value, run in zip(kept.tolist(), token_ids.split(counts.tolist()), strict=True):
        if value != plain:
            found.append(f"{tokenizer.decode(run).strip()} ({value:.2f})")
    return " | ".join(found)


def pad_rows(rows: Sequence[Tensor], side: str = "right") -> tuple[Tensor, Tensor]:
    """Rows of any length as one tensor.

    Args:
        rows: B tensors of one dtype, 1-D each, at least one.
        side: where padding goes, `right` or `left`.

    Returns:
        (B, longest) padded with 0, and the mask (B, longest) of what is real, both in the rows' dtype.

    Raises:
        ValueError: there are no rows.
    """
    if not len(rows):
        raise ValueError("rows: the batch is empty; expected at least one tensor")
    ids, mask = (
        torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True, padding_side=side)
        for tensors in (rows, [torch.ones_like(row) for row in rows])
    )
    return ids, mask


def service_obstacles(
    config: CounterfactualConfig, *, group_size: int | None = None, entropies: bool = False
) -> Iterator[str]:
    """What of `config` cannot run where a service gives log-probs of sampled tokens and nothing else of the model.

    Args:
        config: how credit is to be assigned.
        group_size: completions of one prompt, if that is known.
        entropies: the host has those of the sampled tokens.

    Yields:
        A sentence for each option that cannot, beginning with its name and value.
    """
    kind, name = config.kind, f"estimator={config.estimator!r}"
    if config.mode == "uniform" or (config.mode == "random" and not kind.needs_siblings):
        return  # no estimator runs
    here = "needs the model in the process that makes the weights, and it lies in others"
    cheap = config.cheap if config.preselect < 1 else None
    if config.estimator == "gradient":
        yield f"{name}: it {here}"
    elif (outcome := config.outcome) in DIVERGENCES:
        yield f"outcome={outcome!r}: it compares distributions, and the host gives log-probs of sampled tokens alone"
    if config.effect == "total":
        yield f"effect='total': it {here}"
    if config.fill == "resampled":
        yield f"fill='resampled': it {here}"
    if config.approximation is not None:
        yield f"approximation={config.approximation!r}: it {here}"
    if cheap in (*APPROXIMATIONS, "gradient"):
        yield f"cheap={cheap!r}: it {here}"
    if config.reads_entropies and not entropies:
        reader = name if config.estimator == "entropy" else f"cheap={cheap!r}"
        yield f"{reader}: the host's workers give no entropies"
    if config.estimator == "external":
        yield f"{name}: nobody hands its numbers in; give a function (model, CreditBatch) -> Importances"
    if kind.needs_siblings and not callable(config.estimator) and group_size == 1:
        yield f"{name}: it compares the completions of a prompt, and there is one of each"


def credit_rows(
    tokenizer: Any,
    prompts: Sequence[Tensor],
    completions: Sequence[Tensor],
    counted: Sequence[Tensor],
    advantages: Sequence[Tensor],
    logprobs_of: LogprobsOf,
    *,
    config: CounterfactualConfig,
    generator: torch.Generator,
    groups: Tensor,
    rewards: Tensor,
    entropies: Sequence[Tensor] | None = None,
    noise: float = FLOAT32_NOISE,
) -> tuple[list[Tensor], dict[str, float]]:
    """Credit for a batch of rows whose model lies in other processes.

    Args:
        tokenizer, config, generator: as in `counterfactual_credit`.
        prompts, completions: B 1-D int64 tensors.
        counted: B tensors (T_b,), 1 on tokens that are trained on, 0 on a tool's, say.
        advantages: B tensors (T_b,), float. Where each row has one advantage throughout, estimators that compare
            rewards with advantages see it as that.
        logprobs_of: the host's log-prob service.
        groups: (B,) int64, equal for completions that are compared with each other.
        rewards: (B,) float.
        entropies: B tensors (T_b,), nats.
        noise: nats per answer token by which rounding moves the service's log-probs; the default is that of float32, a
            model in bfloat16 gives some hundredths.

    Returns:
        B tensors (T_b,) in the advantages' dtype, what to train on; tokens that do not count keep theirs. And
        the figures to log.

    Raises:
        ValueError, NotImplementedError: as `counterfactual_credit`.
    """
    mask, own = pad_rows(counted)[0], pad_rows(advantages)[0]
    credit = counterfactual_credit(
        None,  # type: ignore[arg-type]  # the model is where log-probs are asked for
        tokenizer,
        *pad_rows(prompts, "left"),
        *pad_rows(completions),
        advantages=_of_rows(own * mask, mask.long()),
        config=config,
        generator=generator,
        score=scorer_from_logprobs(logprobs_of),
        groups=groups,
        rewards=rewards,
        entropies=None if entropies is None else pad_rows(entropies)[0],
        noise=noise,
    )
    credited = torch.where(mask.bool(), credited_advantages(own, credit), own)
    return [row[: len(mine)] for row, mine in zip(credited, advantages, strict=True)], credit.metrics(mask)


def _of_rows(advantages: Tensor, mask: Tensor) -> Tensor:
    """(B, T) advantages that are 0 outside of `mask` as (B,), if inside of it each row has one value; else as given."""
    first = advantages.gather(1, mask.argmax(1, keepdim=True))
    return first[:, 0] if torch.equal(advantages, first * mask) else advantages


def scorer_from_logprobs(logprobs_of: LogprobsOf) -> Callable[..., CounterfactualScores]:
    """Scoring by a host's own log-prob service, for `counterfactual_credit(..., score=...)`.

    A model that is sharded over processes cannot run the packed tree, which needs it whole. So each answer, and each
    answer with a span masked, becomes an ordinary sequence, cut after the answer; all go out in one request. The
    scores are those of `score_counterfactuals` to rounding, at the service's temperature; the
    work is not shared between sequences (`work.tokens_fed` says how much it was).

    Args:
        logprobs_of: the service; called at most once for a batch that is scored.

    Returns:
        What stands in for `score_counterfactuals`; scores are on the CPU. It raises `ValueError` if the service gives
        another number of sequences or tokens than it was asked for, or if log-probs of whole completions or a
        temperature are asked for, and `NotImplementedError` for an outcome that log-probs do not tell.
    """

    def score(
        model: object,
        prompts: Sequence[Tensor],
        completions: Sequence[Tensor],
        spans: Sequence[Sequence[Span]],
        answers: Sequence[Span | None],
        *,
        placeholder_id: int,
        **options: Any,
    ) -> CounterfactualScores:
        if options.get("logprobs") or options.get("temperature", 1.0) != 1.0:
            raise ValueError("log-probs of whole completions and temperatures are the host's own business here")
        outcome = options.get("outcome", "logprob")
        if outcome not in ("logprob", "mean_logprob"):
            raise NotImplementedError(f"outcome={outcome!r} needs distributions, and the host gives log-probs alone")
        asked_prompts: list[Tensor] = []
        asked: list[Tensor] = []
        for prompt, completion, row_spans, answer in zip(prompts, completions, spans, answers, strict=True):
            if answer is None:
                continue
            base = completion[: answer.end]
            branches = [base.clone() for _ in row_spans]
            for branch, (start, end) in zip(branches, row_spans, strict=True):
                branch[start:end] = placeholder_id
            asked += [base, *branches]
            asked_prompts += [prompt] * (1 + len(branches))
        given = list(logprobs_of(asked_prompts, asked)) if asked else []
        if [len(row) for row in given] != [len(row) for row in asked]:
            raise ValueError(f"asked for log-probs of {len(asked)} sequences, got {len(given)} or other lengths")
        scores = iter(given)
        base_scores = torch.full((len(prompts),), float("nan"))
        masked: list[Tensor] = []
        for b, (row_spans, answer) in enumerate(zip(spans, answers, strict=True)):
            if answer is None:
                masked.append(torch.full((len(row_spans),), float("nan")))
                continue
            answered = [next(scores)[answer.start :].float().sum().cpu() for _ in range(1 + len(row_spans))]
            if outcome == "mean_logprob":
                answered = [value / (answer.end - answer.start) for value in answered]
            base_scores[b] = answered[0]
            masked.append(torch.stack(answered[1:]) if row_spans else torch.zeros(0))
        drop = [row - base for row, base in zip(masked, base_scores, strict=True)]
        fed = sum(len(row) for row in asked_prompts) + sum(len(row) for row in asked)
        head_rows = sum(len(row) for row in asked)
        return CounterfactualScores(base_scores, masked, drop, None, ScoringWork(len(asked), fed, fed, head_rows))

    return score
