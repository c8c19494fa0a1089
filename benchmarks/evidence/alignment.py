"""`python -m benchmarks evidence alignment`: measure how well a small batch's step points at the true gradient.

A step is as good as its direction. The true gradient of the expected reward comes from many completions (REINFORCE with
the mean of the group as its baseline, summed over tokens, nothing reshaped), in parts from independent draws, whose
scatter says how far it is known. Then every arm's gradient on the same small batches is compared with it: the cosine
counts bias and noise together. Arms are paired batch by batch. Cosines of larger batches come from sums of small ones,
which is exact: denominators scale a step only.
"""

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.evidence.arms import ARMS, PLAIN, Arm, Group, Judged, arms_of
from benchmarks.evidence.models import Subject, clock
from benchmarks.evidence.regimes import ASSETS, REGIMES, check, density, problems
from benchmarks.harness.results import Pieces, made_by, table
from cfa_kernels import Rows, packed_forward
from cfa_kernels.options import POSITIVE, Count, Interval
from cfa_kernels.rows import keyed_generator
from trainer import one_page

SIZES = (1, 4, 16, 64)
"""Groups of a batch."""
ADAM, MOMENTS = 4, 20
"""Groups of the batches that Adam's geometry is measured at; earlier batches that its second moments come from."""
PARTS = 8
"""Parts of the true gradient."""


@dataclass(frozen=True)
class AlignmentSettings:
    """Size of the measurement."""

    model: str = ""
    """Folder or hub name of the policy, such as a checkpoint of a run; by default the small model that comes along."""
    problems: str = ""
    """JSON lines with `question` and `answer`; by default generated word problems."""
    regime: str = ""
    """Name in `regimes.REGIMES`, in place of `problems` and `max_tokens`; its own model unless one is named."""
    parameters: str = "."
    """Expression for the names of the parameters whose gradients are compared."""
    truth_groups: Annotated[int, Interval(PARTS)] = 8192
    """Groups of the true gradient, dealt out to eight parts."""
    blocks: Annotated[int, Interval(3)] = 10
    """Blocks of 64 groups that arms are measured on."""
    group: Annotated[int, Interval(2)] = 8
    """Completions of a problem."""
    max_tokens: Count = 80
    """Longest completion."""
    temperature: Annotated[float, POSITIVE] = 1.0
    """Of sampling, and of the gradients."""
    continuations: Count = 2
    """Continuations of each step's end, for each of the ceiling's twins."""
    seed: int = 0
    """Seed of problems and draws."""

    def __post_init__(self) -> None:
        check(self)
        if self.regime and self.problems:
            raise ValueError(f"problems: regime={self.regime!r} has its own, got {self.problems!r}; leave one out")


class Policy(Subject):
    """A model, the problems it is asked, and gradients of what it answers."""

    def __init__(self, settings: AlignmentSettings) -> None:
        regime = REGIMES.get(settings.regime)
        model = settings.model or (one_page.Settings.model if regime is None else str(ASSETS))
        super().__init__(one_page.Settings(
            model=model, problems=settings.problems or None, group=settings.group, temperature=settings.temperature,
            max_tokens=settings.max_tokens if regime is None else regime.max_tokens, held_out=1,
        ))  # fmt: skip
        self.continuations = settings.continuations
        names = [name for name, _ in self.model.named_parameters() if re.search(settings.parameters, name)]
        if not names:
            raise ValueError(f"parameters: no parameter of the model matches {settings.parameters!r}")
        self.parameters = [self.model.get_parameter(name) for name in names]
        if regime is None:
            self.problems, _ = one_page.load(self.settings, self.tokenizer)
        else:
            rows = problems(regime, "train", settings.seed, 2048)
            pairs = [(row["question"], row["answer"].rpartition("####")[2]) for row in rows]
            encode = one_page.encode
            self.problems = [one_page.Problem(encode(q, self.tokenizer), one_page.number(a)) for q, a in pairs]

    def groups(self, *key: int, count: int) -> Iterator[Group]:
        """Sample groups; equal keys give equal problems and completions."""
        generator = keyed_generator(*key)
        torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
        chosen = torch.randint(len(self.problems), (count,), generator=generator).tolist()
        for start in range(0, count, 32):
            asked = [self.problems[i] for i in chosen[start : start + 32] for _ in range(self.settings.group)]
            rows, rewards = self.answered(asked)
            for first in range(0, len(asked), self.settings.group):
                part, prompt = slice(first, first + self.settings.group), torch.tensor(asked[first].prompt)
                group = Rows([prompt] * self.settings.group, rows[part])
                yield Group(group, torch.tensor(rewards[part]), asked[first])

    def gradient(self, forward: Any, advantages: Tensor | Sequence[Tensor]) -> Tensor:
        """Compute the gradient of the sum over tokens of log-prob times advantage, (D,) on the CPU."""
        logprobs = forward.logprobs(self.settings.temperature)
        terms = [(row * a.to(row)).sum() for row, a in zip(logprobs, advantages, strict=True)]
        found = torch.autograd.grad(
            torch.stack(terms).sum(), self.parameters, retain_graph=True, materialize_grads=True
        )
        return torch.cat([part.flatten() for part in found]).cpu()


def true_gradient(policy: Policy, settings: AlignmentSettings) -> Tensor:
    """Sum REINFORCE's gradient over groups, a part of them in each row, (PARTS, D)."""
    parts = torch.zeros(PARTS, sum(p.numel() for p in policy.parameters), dtype=torch.float64)
    for i, group in enumerate(policy.groups(settings.seed, 1, count=settings.truth_groups)):
        advantages = group.rewards - group.rewards.mean()
        if advantages.any():
            parts[i % PARTS] += policy.gradient(packed_forward(policy.model, group.rows), advantages)
    if not parts.any():
        raise ValueError("truth_groups: no group has both a right and a wrong completion, so there is nothing to learn")
    return parts.float()


def run(
    pieces: Pieces, folder: Path, settings: AlignmentSettings, *, arms: Sequence[str] | None = None
) -> dict[str, Any]:
    """Measure the arms, block by block, and sum up.

    Args:
        pieces: the products of each block.
        folder: of the vectors that blocks are compared with: the true gradient, the mean squares for Adam.
        settings: how much.
        arms: names that `arms_of` takes; default the set "main".

    Raises:
        ValueError: an unknown arm, or settings that leave nothing to measure.
    """
    chosen, policy = arms_of(arms or ["main"]), Policy(settings)
    known = {name: value for name, value in asdict(settings).items() if name not in ("blocks", "continuations")}
    truth = _kept(folder / "true.pt", known, lambda: true_gradient(policy, settings))
    gram = (truth @ truth.T).double().numpy()
    if min(_strength(np.delete(np.delete(gram, part, 0), part, 1)) for part in range(PARTS)) <= 0:
        raise ValueError("truth_groups: the parts of the true gradient do not agree; raise it")
    print(f"true gradient: norm {math.sqrt(_strength(gram)):.3g} for an eighth of the groups")
    own = known | {"arms": list(chosen), "continuations": settings.continuations}
    squares = _kept(folder / "squares.pt", own, lambda: mean_squares(policy, chosen, settings))
    blocks = []
    for block in range(settings.blocks):
        blocks.append(pieces.get(f"block {block}", lambda: _block(policy, chosen, block, truth, squares, settings)))  # noqa: B023
        print(f"block {block + 1} of {settings.blocks}")
    agreement = float(torch.cosine_similarity(truth[::2].sum(0), truth[1::2].sum(0), dim=0))
    figures = summary([block["products"] for block in blocks], gram)
    step = sum(block["seconds"][part] for block in blocks for part in ("sampling", "forward", "backward"))
    for name, figure in figures.items():
        figure["cost"] = sum(block["seconds"][name] for block in blocks) / step
    share = density(REGIMES[settings.regime], policy.tokenizer) if settings.regime else None
    return {"settings": asdict(settings), "agreement": agreement, "density": share, "arms": figures}


def _kept(path: Path, settings: Mapping[str, Any], make: Callable[[], Any]) -> Any:
    """Read what is in a file of the same settings, or make it and write it."""
    if path.exists() and (known := torch.load(path, weights_only=True))["settings"] == settings:
        return known["value"]
    value, draft = make(), path.with_suffix(".draft")
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"settings": dict(settings), "value": value}, draft)
    draft.replace(path)
    return value


def _batches(
    policy: Policy, arms: Mapping[str, Arm], seconds: dict[str, float], *key: int, sizes: Sequence[int], count: int
) -> Iterator[tuple[int, str, Tensor]]:
    """Size, arm and gradient of each batch that has one; adds seconds by `clock`, by part of a step and by arm."""
    sums: dict[tuple[int, str], Tensor] = {}
    groups, start = policy.groups(*key, count=count), clock(policy.model.device)
    for i, group in enumerate(groups, 1):
        seconds["sampling"] += clock(policy.model.device) - start
        gradients: dict[str, Tensor] = {}
        if (group.rewards != group.rewards[0]).any():
            judged = Judged(policy, group)
            gradients = {name: judged.gradient(arm) for name, arm in arms.items()}
            for name in ("forward", "backward"):
                seconds[name] += judged.seconds[name]
            for name, arm in arms.items():
                seconds[name] += judged.cost(arm)
        for size, name in itertools.product(sizes, arms):
            if gradients:
                sums[size, name] = sums.get((size, name), 0) + gradients[name]
            if i % size == 0 and (size, name) in sums:
                yield size, name, sums.pop((size, name))
        start = clock(policy.model.device)


def mean_squares(policy: Policy, arms: Mapping[str, Arm], settings: AlignmentSettings) -> dict[str, Tensor]:
    """Average the squares of each arm's gradient over batches, (D,): the second moments that Adam would have."""
    sums: dict[str, Tensor] = {}
    batches = _batches(policy, arms, Counter(), settings.seed, 2, sizes=[ADAM], count=MOMENTS * ADAM)
    for _, name, whole in batches:
        sums[name] = sums.get(name, 0) + whole.mean(0) ** 2 / MOMENTS
    return sums


def _block(
    policy: Policy, arms: Mapping[str, Arm], block: int, truth: Tensor, squares: Mapping[str, Tensor],
    settings: AlignmentSettings,
) -> dict[str, Any]:  # fmt: skip
    """For each geometry, size and arm: products of each batch's gradient with the truth's parts and with itself.

    "seconds": those by `clock` of a plain step on these groups, and each arm's credit.
    """
    products: dict[str, Any] = defaultdict(lambda: defaultdict(list))
    seconds = dict.fromkeys(["sampling", "forward", "backward", *arms], 0.0)
    for size, name, whole in _batches(policy, arms, seconds, settings.seed, 3, block, sizes=SIZES, count=SIZES[-1]):
        steps = {str(size): whole}
        if size == ADAM:
            scale = squares[name].sqrt()
            steps["adam"] = whole / (scale + 1e-4 * scale.mean())
        for key, step in steps.items():
            products[key][name].append([*(truth @ step.mean(0)).tolist(), float(step[0] @ step[-1])])
    return {"products": products, "seconds": seconds}


def summary(
    blocks: Sequence[Mapping[str, Mapping[str, Sequence[Sequence[float]]]]], gram: np.ndarray
) -> dict[str, Any]:
    """Sum up what `_block` gives: for each arm and each size, or "adam", cosine, ratio to plain's and difference.

    Errors are jackknives over batches, which are paired with plain's, and over the parts of the truth, which all
    batches share, added as squares; those of `aim` and `noise to signal` are over blocks and parts. `aim` is the cosine
    of the arm's mean gradient and `noise to signal` the variance of a group's over the squared norm of that mean, which
    follows from how the mean square falls with the size. None where the estimated norm is not above 0. Batches of an
    arm with a twin are `pooled`.

    Args:
        blocks: of each block its products.
        gram: (P, P) products of the truth's parts with each other.
    """
    figures: dict[str, Any] = {}
    for name in blocks[0][str(SIZES[0])]:
        figures[name], pooled = {}, ARMS.get(name, ARMS[PLAIN]).twin
        for key in blocks[0]:
            own, plain = (
                _cosines(np.array([line for block in blocks for line in block[key][one]]), gram, pooled)
                for one in (name, PLAIN)
            )
            figure = figures[name][key] = {"batches": len(own) - 1 - len(gram)}
            for label, values in (("", own), ("difference", own - plain), ("ratio", own / plain)):
                figure[label or "cosine"] = float(values[0])
                figure[f"{label}_error".lstrip("_")] = _error(values, len(gram))
        lines = list[list[float]]()  # of each block, per group; groups without a gradient count as 0
        for block in blocks:
            small, large = (np.sum(block[str(size)][name], 0) / size for size in (SIZES[0], SIZES[-1]))
            lines.append([*large[:-1], large[-1] / SIZES[-1], small[-1] / SIZES[-1]])
        ends = _jackknife(np.array(lines), gram, _aim)
        for key, values in zip(("aim", "noise to signal"), ends.T, strict=True):
            value, error = float(values[0]), _error(values, len(gram))
            figures[name][key] = {"value": value, "error": error} if math.isfinite(value + error) else None
    return figures


def _strength(gram: np.ndarray) -> float:
    """Squared norm of the mean of the truth's parts, free of their noise: the mean product of two parts."""
    return float((gram.sum() - gram.trace()) / (len(gram) * (len(gram) - 1)))


def _jackknife(lines: np.ndarray, gram: np.ndarray, figure: Callable[..., Any]) -> np.ndarray:
    """A figure of n lines, first; then the same without each of them, and without each part of the truth.

    It takes the mean product with the truth, by the truth's norm, and the mean of the columns behind the P products.
    """

    def at(mean: np.ndarray, without: int | None = None) -> Any:
        kept = [part for part in range(len(gram)) if part != without]
        product = mean[kept].mean() / math.sqrt(_strength(gram[np.ix_(kept, kept)]))
        return figure(product, *mean[len(gram) :])

    mean, left = lines.mean(0), (lines.sum(0) - lines) / (len(lines) - 1)
    return np.array([at(mean), *map(at, left), *(at(mean, part) for part in range(len(gram)))])


def _cosines(lines: np.ndarray, gram: np.ndarray, pooled: bool) -> np.ndarray:
    """Mean cosine of batches; pooled, mean product over the root of the mean square, which twins may have below 0."""
    if not pooled:
        lines = np.c_[lines[:, :-1] / np.sqrt(lines[:, -1:]), np.ones(len(lines))]
    return _jackknife(lines, gram, lambda product, square: product / np.sqrt(square))


def _error(values: np.ndarray, parts: int) -> float:
    """Standard error of the first of the values from those behind it, each without a batch, or a part of the truth."""
    groups = values[1:-parts], values[-parts:]
    return math.sqrt(sum((len(left) - 1) * np.var(left) for left in groups))


def _aim(product: float, large: float, small: float) -> list[float]:
    """Cosine of an arm's mean gradient, and the variance of a group's gradient over that mean's squared norm."""
    noise = (small - large) / (1 / SIZES[0] - 1 / SIZES[-1])
    signal = large - noise / SIZES[-1]
    return [product / math.sqrt(signal), noise / signal] if signal > 0 else [math.nan, math.nan]


def markdown(document: Mapping[str, Any]) -> str:
    """The tables of the command."""
    settings, arms = document["settings"], document["arms"]
    head = ["arm", *(f"{size * settings['group']} completions" for size in SIZES), "to plain", "difference",
            "Adam: to plain", "aim", "noise to signal", "cost"]  # fmt: skip
    rows = []
    for name, figures in arms.items():
        at, adam = figures[str(ADAM)], figures["adam"]
        ends = [
            "–" if (one := figures[key]) is None else f"{one['value']:.{digits}f} ± {one['error']:.{digits}f}"
            for key, digits in (("aim", 2), ("noise to signal", 0))
        ]
        rows.append([
            name, *(f"{figures[str(size)]['cosine']:.3f}" for size in SIZES),
            f"{at['ratio']:.2f} ± {at['ratio_error']:.2f}", f"{at['difference']:+.3f} ± {at['difference_error']:.3f}",
            f"{adam['ratio']:.2f} ± {adam['ratio_error']:.2f}" if math.isfinite(adam["ratio"]) else "–", *ends,
            f"{figures['cost']:.2f}",
        ])  # fmt: skip
    groups, size = settings["truth_groups"], settings["group"]
    about = f"Regime `{settings['regime']}`, " if settings["regime"] else ""
    about += f"{document['density']:.0%} of its tokens in steps and answer. " if about else ""
    note = (
        f"{made_by(document)}. {about}Cosine of a batch's gradient with the true one, from {groups} groups of {size} "
        f"(cosine of its halves {document['agreement']:.2f}), over {settings['blocks']} blocks of {SIZES[-1]} groups. "
        f"Ratios and differences are those at {ADAM * size} completions, paired with plain DAPO's; their squares are "
        "roughly ratios of completions. Standard errors count batches and how well the true gradient is known. *Adam*: "
        f"each arm's gradient divided by the root of its own mean square over {MOMENTS} earlier batches, whose draw "
        "the errors do not count. *Aim* is the cosine of the arm's mean gradient (1 is no bias; an estimate may exceed "
        "it), *noise to signal* the variance of a group's gradient over the squared norm of that mean, *cost* the "
        "processor's seconds (on a GPU those by the wall) for the credit over those of a plain step: sampling, forward "
        "and backward.\n"
    )
    return "\n".join(["# Alignment with the true gradient\n", note, table(head, rows)])
