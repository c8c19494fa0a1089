"""`python -m benchmarks evidence alignment`: measure how well a small batch's step points at the true gradient.

A step is as good as its direction. The true gradient of the expected reward comes from many completions (REINFORCE with
the mean of the group as its baseline, summed over tokens, nothing reshaped), in parts from independent draws, whose
scatter says how far it is known. Then every arm's gradient on the same small batches is compared with it: the cosine
counts bias and noise together. Arms are paired batch by batch. Cosines of larger batches come from sums of small ones,
which is exact: denominators scale a step only. Of a large model a few weights will do (`parameters`).
"""

import functools
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.environment import describe_environment
from benchmarks.harness.results import Pieces, made_by, table
from benchmarks.research.arms import ARMS, NEAR, PLAIN, Arm, Groups, Judged, arms_of
from benchmarks.research.models import Problem, Subject, clock, posed, read_problems, require_mixed
from benchmarks.research.regimes import ASSETS, REGIMES, check, density, problems
from cfa_kernels import Rows, packed_forward
from cfa_kernels.options import POSITIVE, Count, Interval
from cfa_kernels.rows import keyed_generator
from cfa_kernels.scoring.packed import PackedForward
from trainer.settings import ASSETS as SMALL

SIZES = (1, 4, 16, 64)  # groups of a batch, in smallest batches
MAIN = 4  # groups of the batches that are compared first, and in Adam's geometry
CREDIT, WORTH = "prefix gain where right, spans open", 1.1
"""The arm that `verdict` speaks of; the ratio of cosines that is worth its cost: a fifth more completions."""
LOOK = 16  # problems of a first look, at whether there is something to learn
STEP = "sampling", "forward", "head", "backward"  # parts of a plain step's time
PARTS = 8  # of the true gradient, unless named


@dataclass(frozen=True)
class AlignmentSettings:
    """Size of the measurement."""

    model: str = ""
    """Folder or hub name of the policy, such as a checkpoint of a run; by default the small model that comes along."""
    problems: str = ""
    """JSON lines with `question` and `answer`; by default generated word problems."""
    examples: Annotated[int, Interval(0)] = 0
    """Short problems of the file that stand solved before every question."""
    computations: Annotated[int, Interval(0)] = 0
    """Most computations of a problem of the file, by GSM8K's marks; 0 for any."""
    regime: str = ""
    """Name in `regimes.REGIMES`, in place of `problems` and `max_tokens`; its own model unless one is named."""
    parameters: str = "."
    """Expression for the names of the parameters whose gradients are compared; "few" for those of three layers."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights and of what the model computes."""
    truth_groups: Count = 8192
    """Groups of the true gradient, dealt out to its parts."""
    parts: Annotated[int, Interval(3)] = PARTS
    """Parts of the true gradient, from independent draws."""
    blocks: Annotated[int, Interval(2)] = 10
    """Blocks of groups that arms are measured on."""
    batch: Count = 1
    """Groups of the smallest batch, which go through the model together."""
    block: Count = 64
    """Most groups of a block, the largest batch: as many smallest ones as a power of four."""
    moments: Annotated[int, Interval(0)] = 20
    """Earlier batches that Adam's second moments come from; 0 leaves his geometry out."""
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
        if self.truth_groups < self.parts:
            raise ValueError(f"truth_groups must be at least parts, {self.parts}, got {self.truth_groups}")
        if len(self.sizes) < 2:
            raise ValueError(f"block must be at least {SIZES[1]} batches of {self.batch} groups, got {self.block}")

    @property
    def sizes(self) -> list[int]:
        """Groups of a batch, ascending; the last is a block."""
        return [self.batch * size for size in SIZES if self.batch * size <= self.block]


class Policy(Subject):
    """A model, the problems it is asked, and gradients of what it answers."""

    def __init__(self, settings: AlignmentSettings) -> None:
        regime = REGIMES.get(settings.regime)
        super().__init__(
            settings.model or str(SMALL if regime is None else ASSETS), temperature=settings.temperature,
            max_tokens=settings.max_tokens if regime is None else regime.max_tokens, dtype=settings.dtype,
        )  # fmt: skip
        self.group, self.continuations = settings.group, settings.continuations
        self.token_budget = None if self.model.device.type == "cuda" else 8192  # so that groups share their examples
        layers, expression = self.model.config.num_hidden_layers, settings.parameters
        if expression == "few":
            expression = rf"layers\.({layers // 6}|{layers // 2}|{5 * layers // 6})\."
        self.parameters = [one for name, one in self.model.named_parameters() if re.search(expression, name)]
        if not self.parameters:
            raise ValueError(f"parameters: no parameter of the model matches {settings.parameters!r}")
        self.model.requires_grad_(False)
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        if regime is None:
            self.problems = read_problems(
                self.tokenizer, settings.problems, examples=settings.examples, computations=settings.computations
            )
        else:
            self.problems = posed(problems(regime, "train", settings.seed, 2048), self.tokenizer)

    def groups(self, *key: int, count: int, batch: int = 1) -> Iterator[Groups]:
        """Sample `count` groups, so many at a time; those of equal rewards are left out. Equal keys give equal ones."""
        generator, size = keyed_generator(*key), self.group
        torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
        chosen = torch.randint(len(self.problems), (count,), generator=generator).tolist()
        at_once = max(32, self.rows_at_once // size) // batch * batch
        for start in range(0, count, at_once):
            asked = [self.problems[i] for i in chosen[start : start + at_once] for _ in range(size)]
            rows, rewards = self.answered(asked)
            yield from self.mixed(asked, rows, rewards, batch)

    def mixed(
        self, asked: Sequence[Problem], rows: Sequence[Tensor], rewards: Sequence[float], batch: int
    ) -> Iterator[Groups]:
        """Cut completions of groups into batches, and leave out groups of equal rewards."""
        for first in range(0, len(asked), batch * self.group):
            own = torch.tensor(rewards[first : first + batch * self.group]).view(-1, self.group)
            mixed = (own != own[:, :1]).any(1).repeat_interleave(self.group)
            kept = (first + mixed.nonzero().flatten()).tolist()
            prompts = [torch.tensor(asked[i].prompt) for i in kept]
            yield Groups(
                Rows(prompts, [rows[i] for i in kept]), own.flatten()[mixed], [asked[i] for i in kept], self.group
            )

    def look(self) -> dict[str, float]:
        """Answer a few problems: shares of right completions and of mixed groups; refuse if nothing can be learnt."""
        asked = [self.problems[i % len(self.problems)] for i in range(LOOK) for _ in range(self.group)]
        return require_mixed(torch.tensor(self.answered(asked)[1]).view(LOOK, -1))

    def logprobs(self, forward: PackedForward) -> list[Tensor]:
        """Compute the log-prob of each token in the distribution that it was drawn from, (T_b,) each."""
        return cast("list[Tensor]", forward.logprobs(self.temperature))

    def gradients(self, forward: PackedForward) -> Callable[[Tensor | Sequence[Tensor]], Tensor]:
        """Prepare gradients of the sum over tokens of log-prob times advantage, (D,) in float32, for any advantages."""
        outputs = torch.cat(self.logprobs(forward))

        def gradient(advantages: Tensor | Sequence[Tensor]) -> Tensor:
            rows = zip(advantages, forward.rows.lengths, strict=True)
            by_token = torch.cat([a.to(outputs).expand(n) for a, n in rows])
            found = torch.autograd.grad(outputs, self.parameters, by_token, retain_graph=True, materialize_grads=True)
            return torch.cat([part.flatten().float() for part in found])

        return gradient


def true_gradient(policy: Policy, settings: AlignmentSettings, part: int) -> Tensor:
    """Sum REINFORCE's gradient over the groups of a part of the truth, (D,) on the CPU."""
    total = torch.zeros(sum(p.numel() for p in policy.parameters), dtype=torch.float64, device=policy.model.device)
    count = settings.truth_groups // settings.parts
    for groups in policy.groups(settings.seed, 1, part, count=count, batch=min(settings.batch, count)):
        if groups.problems:
            forward = packed_forward(policy.model, groups.rows, token_budget=policy.token_budget)
            total += policy.gradients(forward)(groups.rewards - groups.means)
    return total.float().cpu()


def run(
    pieces: Pieces, folder: Path, settings: AlignmentSettings, *, arms: Sequence[str] | None = None
) -> dict[str, Any]:
    """Measure the arms, block by block, and sum up.

    Args:
        pieces: a first look, the truth's figures, and the products of each block.
        folder: of the vectors that blocks are compared with: parts of the true gradient, the mean squares for Adam.
        settings: how much.
        arms: names that `arms_of` takes; default the set "main".

    Raises:
        ValueError: an unknown arm, or settings that leave nothing to measure.
    """
    chosen, policy = arms_of(arms or ["main"]), Policy(settings)
    look = pieces.get("first look", policy.look)
    measured_on = pieces.get("measured on", lambda: describe_environment(policy.model.device, None)["device"])
    print(f"first look: {look['right']:.0%} right, {look['mixed']:.0%} of the groups have right and wrong completions")
    known = {name: value for name, value in asdict(settings).items() if name not in ("blocks", "continuations")}

    def part(number: int) -> Any:
        return _kept(folder / f"true-{number}.pt", known, lambda: true_gradient(policy, settings, number))

    @functools.cache
    def truth() -> Tensor:  # (parts, D)
        return torch.stack([*map(part, range(settings.parts))]).to(policy.model.device)

    @functools.cache
    def squares() -> dict[str, Tensor]:
        own = known | {"arms": list(chosen), "continuations": settings.continuations}
        return _kept(folder / "squares.pt", own, lambda: mean_squares(policy, chosen, settings))  # type: ignore[no-any-return]

    about = pieces.get("truth", lambda: _agreement(truth()))
    gram = np.array(about["gram"])
    print(f"true gradient: norm {math.sqrt(_strength(gram)):.3g} for each part of the groups")
    blocks = []
    for block in range(settings.blocks):
        blocks.append(pieces.get(f"block {block}", lambda: _block(policy, chosen, block, truth(), squares, settings)))  # noqa: B023
        print(f"block {block + 1} of {settings.blocks}")
    figures = summary([block["products"] for block in blocks], gram)
    step = sum(block["seconds"][part] for block in blocks for part in STEP)
    for name, figure in figures.items():
        figure["cost"] = sum(block["seconds"][name] for block in blocks) / step
    share = density(REGIMES[settings.regime], policy.tokenizer) if settings.regime else None
    about = {"agreement": about["agreement"], "density": share, "look": look, "measured on": measured_on}
    document = {"settings": asdict(settings), **about, "arms": figures}
    if CREDIT in figures:
        print(verdict(document))
    return document


def _agreement(truth: Tensor) -> dict[str, Any]:
    """Products of the truth's parts with each other, and the cosine of its halves."""
    gram = (truth @ truth.T).double().cpu().numpy()
    if min(_strength(np.delete(np.delete(gram, part, 0), part, 1)) for part in range(len(gram))) <= 0:
        raise ValueError("truth_groups: the parts of the true gradient do not agree; raise it")
    halves = torch.cosine_similarity(truth[::2].sum(0), truth[1::2].sum(0), dim=0)
    return {"gram": gram.tolist(), "agreement": float(halves)}


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
    drawn, start = policy.groups(*key, count=count, batch=sizes[0]), clock(policy.model.device)
    for done, groups in zip(itertools.count(sizes[0], sizes[0]), drawn, strict=False):
        seconds["sampling"] += clock(policy.model.device) - start
        gradients: dict[str, Tensor] = {}
        if groups.problems:
            judged = Judged(policy, groups)
            gradients = {name: judged.gradient(arm) for name, arm in arms.items()}
            for name in STEP[1:]:
                seconds[name] += judged.seconds[name]
            for name, arm in arms.items():
                seconds[name] += judged.cost(arm)
        for size, name in itertools.product(sizes, arms):
            if gradients:
                sums[size, name] = sums.get((size, name), 0) + gradients[name]
            if done % size == 0 and (size, name) in sums:
                yield size, name, sums.pop((size, name))
        start = clock(policy.model.device)


def mean_squares(policy: Policy, arms: Mapping[str, Arm], settings: AlignmentSettings) -> dict[str, Tensor]:
    """Average the squares of each arm's gradient over batches, (D,): the second moments that Adam would have."""
    sums: dict[str, Tensor] = {}
    batches = _batches(policy, arms, Counter(), settings.seed, 2, sizes=[MAIN], count=settings.moments * MAIN)
    for _, name, whole in batches:
        sums[name] = sums.get(name, 0) + whole.mean(0) ** 2 / settings.moments
    return sums


def _block(
    policy: Policy, arms: Mapping[str, Arm], block: int, truth: Tensor, squares: Callable[[], Mapping[str, Tensor]],
    settings: AlignmentSettings,
) -> dict[str, Any]:  # fmt: skip
    """For each geometry, size and arm: products of each batch's gradient with the truth's parts and with itself.

    "seconds": those by `clock` of a plain step on these groups, and each arm's credit.
    """
    products: dict[str, Any] = defaultdict(lambda: defaultdict(list))
    seconds, sizes = dict.fromkeys([*STEP, *arms], 0.0), settings.sizes
    for size, name, whole in _batches(policy, arms, seconds, settings.seed, 3, block, sizes=sizes, count=sizes[-1]):
        steps = {str(size): whole}
        if size == MAIN and settings.moments:
            scale = squares()[name].sqrt()
            steps["adam"] = whole / (scale + 1e-4 * scale.mean())
        for key, step in steps.items():
            products[key][name].append([*(truth @ step.mean(0)).tolist(), float(step[0] @ step[-1])])
    if not products:
        raise ValueError(
            f"block: no group of block {block} has right and wrong completions; raise block, now {sizes[-1]}"
        )
    return {"products": products, "seconds": seconds}


def summary(
    blocks: Sequence[Mapping[str, Mapping[str, Sequence[Sequence[float]]]]], gram: np.ndarray
) -> dict[str, Any]:
    """Sum up what `_block` gives: for each arm and each size, or "adam", cosine, ratio to plain's and difference.

    Errors are jackknives over batches, which are paired with plain's, and over the parts of the truth, which all
    batches share, added as squares; those of `aim` and `noise to signal` are over blocks and parts. `aim` is the cosine
    of the arm's mean gradient and `noise to signal` the variance of a group's over the squared norm of that mean, which
    follows from how the mean square falls with the size; so do figures at `MAIN` groups where no batch has so many.
    None where an estimated norm is not above 0. Batches of an arm with a twin are `pooled`.

    Args:
        blocks: of each block its products.
        gram: (P, P) products of the truth's parts with each other.
    """
    figures, ends, sizes = dict[str, Any](), dict[str, np.ndarray](), sizes_of(blocks[0])
    for name in blocks[0][str(sizes[0])]:
        figures[name], pooled = {}, ARMS.get(name, ARMS[PLAIN]).twin
        for key in blocks[0]:
            own, plain = (
                _cosines(np.array([line for block in blocks for line in block[key][one]]), gram, pooled)
                for one in (name, PLAIN)
            )
            figures[name][key] = _compared(own, plain, len(gram), len(own) - 1 - len(gram))
            whole = name.removesuffix(NEAR)
            if whole != name and whole in blocks[0][key]:
                every = _cosines(np.array([line for block in blocks for line in block[key][whole]]), gram, pooled)
                figures[name][key]["to all spans"] = _compared(own, every, len(gram), len(own) - 1 - len(gram))
        lines = list[list[float]]()  # of each block, per group; groups without a gradient count as 0
        for block in blocks:
            small, large = (np.sum(block[str(size)][name], 0) / size for size in (sizes[0], sizes[-1]))
            lines.append([*large[:-1], large[-1] / sizes[-1], small[-1] / sizes[-1]])
        ends[name] = _jackknife(np.array(lines), gram, functools.partial(_aim, sizes=sizes)).T
        for key, values in zip(("aim", "noise to signal"), ends[name], strict=False):
            value, error = float(values[0]), _error(values, len(gram))
            figures[name][key] = {"value": value, "error": error} if math.isfinite(value + error) else None
        if MAIN not in sizes:
            figures[name][str(MAIN)] = _compared(ends[name][2], ends[PLAIN][2], len(gram), len(blocks))
    return figures


def _compared(own: np.ndarray, plain: np.ndarray, parts: int, batches: int) -> dict[str, Any]:
    """Cosine of an arm, its difference from plain's and the ratio, with jackknife errors."""
    figure: dict[str, Any] = {"batches": batches}
    for label, values in (("", own), ("difference", own - plain), ("ratio", own / plain)):
        figure[label or "cosine"] = float(values[0])
        figure[f"{label}_error".lstrip("_")] = _error(values, parts)
    return figure


def sizes_of(figures: Mapping[str, Any]) -> list[int]:
    """Sizes of batches, in groups, that products or figures were taken at."""
    return sorted(int(key) for key in figures if key.isdigit())


def _strength(gram: np.ndarray) -> float:
    """Squared norm of the mean of the truth's parts, free of their noise: the mean product of two parts."""
    return float((gram.sum() - gram.trace()) / (len(gram) * (len(gram) - 1)))


def _jackknife(lines: np.ndarray, gram: np.ndarray, figure: Callable[..., Any]) -> np.ndarray:
    """A figure of n lines, first; then the same without each of them, and without each part of the truth.

    It takes the mean product with the truth, by the truth's norm, and the mean of the columns behind the P products.
    """

    def product(means: np.ndarray, without: int | None = None) -> Any:
        kept = [part for part in range(len(gram)) if part != without]
        return means[..., kept].mean(-1) / math.sqrt(_strength(gram[np.ix_(kept, kept)]))

    means, parts = np.vstack([lines.mean(0), (lines.sum(0) - lines) / (len(lines) - 1)]), range(len(gram))
    products = [*product(means), *(product(means[0], part) for part in parts)]
    behind = [*means[:, len(gram) :], *(means[0, len(gram) :] for _ in parts)]
    return np.array([figure(one, *rest) for one, rest in zip(products, behind, strict=True)])


def _cosines(lines: np.ndarray, gram: np.ndarray, pooled: bool) -> np.ndarray:
    """Mean cosine of batches; pooled, mean product over the root of the mean square, which twins may have below 0."""
    if not pooled:
        lines = np.c_[lines[:, :-1] / np.sqrt(lines[:, -1:]), np.ones(len(lines))]
    return _jackknife(lines, gram, lambda product, square: product / np.sqrt(square))


def _error(values: np.ndarray, parts: int) -> float:
    """Standard error of the first of the values from those behind it, each without a batch, or a part of the truth."""
    groups = values[1:-parts], values[-parts:]
    return math.sqrt(sum((len(left) - 1) * np.var(left) for left in groups))


def _aim(product: float, large: float, small: float, *, sizes: Sequence[int]) -> list[float]:
    """Cosine of an arm's mean gradient, the variance of a group's over that mean's squared norm, cosine at `MAIN`."""
    noise = (small - large) / (1 / sizes[0] - 1 / sizes[-1])
    signal, square = large - noise / sizes[-1], large + noise * (1 / MAIN - 1 / sizes[-1])
    ends = [product / math.sqrt(signal), noise / signal] if signal > 0 else [math.nan, math.nan]
    return [*ends, product / math.sqrt(square) if square > 0 else math.nan]


def verdict(document: Mapping[str, Any]) -> str:
    """Say whether credit would help, by its arm's ratio to plain's cosine and the 95 % interval."""
    figure, completions = document["arms"][CREDIT][str(MAIN)], MAIN * document["settings"]["group"]
    low, high = (figure["ratio"] + sign * 1.96 * figure["ratio_error"] for sign in (-1, 1))
    said, more = "may or may not help", "; more truth_groups and blocks can tell"
    if low > 1 or high < WORTH:
        said, more = "would help" if low > 1 else "would not help", ""
    return (
        f"credit {said} here: a step from {completions} completions has {figure['ratio']:.2f} ({low:.2f} to "
        f"{high:.2f}) of the plain step's cosine with the true gradient{more}"
    )


def markdown(document: Mapping[str, Any]) -> str:
    """The tables of the command."""
    settings, arms = document["settings"], document["arms"]
    sizes = sizes_of(arms[PLAIN])
    head = ["arm", *(f"{size * settings['group']} completions" for size in sizes), "to plain", "difference",
            "Adam: to plain", "aim", "noise to signal", "cost"]  # fmt: skip
    rows = []
    for name, figures in arms.items():
        at, adam = figures[str(MAIN)], figures.get("adam", {"ratio": math.nan})
        ends = [
            "–" if (one := figures[key]) is None else f"{one['value']:.{digits}f} ± {one['error']:.{digits}f}"
            for key, digits in (("aim", 2), ("noise to signal", 0))
        ]
        rows.append([
            name, *(f"{figures[str(size)]['cosine']:.3f}" for size in sizes),
            f"{at['ratio']:.2f} ± {at['ratio_error']:.2f}", f"{at['difference']:+.3f} ± {at['difference_error']:.3f}",
            f"{adam['ratio']:.2f} ± {adam['ratio_error']:.2f}" if math.isfinite(adam["ratio"]) else "–", *ends,
            f"{figures['cost']:.2f}",
        ])  # fmt: skip
    groups, size, moments = settings["truth_groups"], settings["group"], settings.get("moments", 20)
    about = f"Regime `{settings['regime']}`, " if settings["regime"] else ""
    about += f"{document['density']:.0%} of its tokens in steps and answer. " if about else ""
    place = f", on {device['name']}" if (device := document.get("measured on")) else ""
    note = (
        f"{made_by(document)}{place}. {about}Cosine of a batch's gradient with the true one, from {groups} groups of "
        f"{size} (cosine of its halves {document['agreement']:.2f}), over {settings['blocks']} blocks of {sizes[-1]}. "
        f"Ratios and differences are those at {MAIN * size} completions, paired with plain DAPO's; their squares are "
        "roughly ratios of completions. Standard errors count batches and how well the true gradient is known. *Adam*: "
        f"each arm's gradient divided by the root of its own mean square over {moments} earlier batches, whose draw "
        "the errors do not count. *Aim* is the cosine of the arm's mean gradient (1 is no bias; an estimate may exceed "
        "it), *noise to signal* the variance of a group's gradient over the squared norm of that mean, *cost* the "
        "processor's seconds (on a GPU those by the wall) for the credit over those of a plain step: sampling, forward "
        "and backward.\n"
    )
    pairs = [
        [name, f"{pair['ratio']:.3f} ± {pair['ratio_error']:.3f}",
         f"{pair['difference']:+.4f} ± {pair['difference_error']:.4f}"]
        for name, figures in arms.items() if (pair := figures[str(MAIN)].get("to all spans"))
    ]  # fmt: skip
    paired = [table([f"of {MAIN * size} completions, paired", "to all spans", "difference"], pairs)] if pairs else []
    return "\n".join(["# Alignment with the true gradient\n", note, table(head, rows), *paired])
