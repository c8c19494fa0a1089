"""`python -m benchmarks evidence papers`: smaller tables of the source papers, on the small models that come along."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from time import process_time
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor
from torch.profiler import profile

from benchmarks.evidence.ablation import ARMS, PLAIN, paired
from benchmarks.evidence.agreement import rank_correlation
from benchmarks.evidence.alignment import AlignmentSettings, Policy
from benchmarks.evidence.arms import Group
from benchmarks.harness.results import Pieces, interval, made_by, table
from cfa_kernels import CounterfactualConfig, DeferredCredit, Gradient, LossBatch, Masking, Rows, packed_forward
from cfa_kernels.scoring.outcomes import Outcome
from cfa_kernels.text.find import find_reasoning
from cfa_kernels.text.rules import AnswerRules, Selection, SpanRules
from trainer import one_page
from trainer.__main__ import main as trainer
from trainer.analyze.statistics import bootstrap_interval, ess_ratio, top_mass
from trainer.evaluate import pass_at
from trainer.rewards.calls import group_advantages

MODELS = {"plain": AlignmentSettings(), "idle8": AlignmentSettings(regime="idle8")}
KINDS = {
    PLAIN: CounterfactualConfig(control="off"), "CF": CounterfactualConfig(), "OAR-G": CounterfactualConfig(Gradient()),
    "OAR-P": CounterfactualConfig(Masking("mean"), units="tokens", weights="bilevel"),
    "entropy, two levels": CounterfactualConfig("entropy", weights="bilevel"),
    "random importances, two levels": CounterfactualConfig(Gradient(), control="random"),
    "random weights of 0 to 1": CounterfactualConfig(control="random", w_min=0.0, w_max=1.0, w_answer=0.5),
}  # fmt: skip
SAMPLES, TURNS, SEEDS = 16, 2, 2
Figures = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class PapersSettings:
    """Size of the tables."""

    groups: int = 16
    """Groups of eight completions to judge, a quarter for tokens of idle8; pass@k is on four times as many problems."""
    steps: int = 10
    """Optimizer steps of the policies that are trained, two of a kind."""


def _sampled(policy: Policy, seed: int, seconds: Counter[str]) -> tuple[Rows, Tensor]:
    """Completions of 8 groups that have an advantage, and it; equal seeds give equal ones."""
    torch.manual_seed(seed)
    asked = [policy.problems[i] for i in torch.randint(len(policy.problems), (8,)) for _ in range(8)]
    began = process_time()
    rows = one_page.sample(policy.model, policy.tokenizer, asked, policy.settings)
    seconds["sampling"] += (now := process_time()) - began
    pairs = zip(rows.completions, asked, strict=True)
    advantages = group_advantages(torch.tensor([one_page.reward(*pair, policy.tokenizer) for pair in pairs]), 8)
    seconds["reward"] += process_time() - now
    some = advantages.nonzero().flatten().tolist()
    return rows.take(some), advantages[some]


def _updated(
    policy: Policy, optimizer: Any, rows: Rows, advantages: Tensor, kind: str, seconds: Counter[str], kept: Any = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Weights of a batch, and its log-probs before the step that this takes, by the `kept` ones where there are."""
    times = [process_time()]
    forward = packed_forward(policy.model, rows, keep_states=KINDS[kind].continues)
    times.append(process_time())
    credit = DeferredCredit(KINDS[kind], policy.tokenizer, rows, advantages, seed=0)
    credit.by_forward(range(len(rows)), forward)
    weights = credit.weights(range(len(rows)))
    times.append(process_time())
    used, old = kept or (weights, None)
    loss, _, logprobs = forward.policy_loss(LossBatch.of(rows, old, advantages, weights=used))
    times.append(process_time())
    loss.backward()
    times.append(process_time())
    torch.nn.utils.clip_grad_norm_(policy.parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    times.append(process_time())
    for stage, taken in zip(("forward", "credit", "forward", "backward", "optimizer"), np.diff(times), strict=True):
        seconds[stage] += taken
    return weights, [row.nan_to_num() for row in logprobs]


def peak_bytes(work: Callable[[], Any]) -> int:
    """Measure the most memory that torch holds on the CPU at a time, beyond what it held before."""
    with profile(profile_memory=True) as seen:
        work()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def stages(_: PapersSettings, __: Path) -> Figures:
    """Shares of the CPU seconds of equal steps on 8 groups, in turns; peak memory of the update beyond the weights."""
    figures: Figures = {}
    for model, kinds in {"plain": [*KINDS][:4], "idle8": [*KINDS][:3]}.items():
        policy, turns, peaks = Policy(MODELS[model]), defaultdict[str, list[Any]](list), dict[str, int]()
        optimizer = torch.optim.AdamW(policy.parameters, lr=0.0)  # every step is the same
        for turn, kind in ((turn, kind) for turn in range(TURNS + 1) for kind in kinds):
            args = (policy, optimizer, *_sampled(policy, turn, seconds := Counter[str]()), kind, seconds)
            if turn:
                _updated(*args)
                turns[kind].append(seconds)
            else:  # which warms up
                peaks[kind] = peak_bytes(lambda: _updated(*args))  # noqa: B023
        for kind, own in turns.items():
            total = sum(own, Counter[str]())
            ratios = [[a.total() / b.total()] for a, b in zip(own, turns[PLAIN], strict=True)]
            figures[f"{model}, {kind}"] = {stage: total[stage] / total.total() for stage in own[0]} | {
                "seconds": total.total() / TURNS, "of plain's": mean_interval(ratios), "peak MB": peaks[kind] / 1e6,
            }  # fmt: skip
    return figures


def mean_interval(groups: Sequence[Sequence[float]]) -> dict[str, float] | None:
    """Average values, with a bootstrap interval over the groups that have any; None if none has."""
    some = [group for group in groups if len(group)]
    return bootstrap_interval(lambda drawn: float(np.mean([*chain(*drawn)])), some)._asdict() if some else None


def _summed(cells: dict[str, dict[str, Any]]) -> Figures:
    """Means of cells, by row and column a list for each group, and the most completions of a row's columns."""
    means = {label: {name: mean_interval(groups) for name, groups in row.items()} for label, row in cells.items()}
    return {k: row | {"completions": max(sum(map(len, c)) for c in cells[k].values())} for k, row in means.items()}


def _groups(key: int, *counts: int) -> Iterator[tuple[str, Policy, Group]]:
    for (model, where), count in zip(MODELS.items(), counts, strict=True):
        policy = Policy(where)
        yield from ((model, policy, group) for group in policy.groups(key, count=count))


def _importances(policy: Policy, rows: Rows, config: CounterfactualConfig) -> tuple[list[list[float]], Any]:
    """Importances of units, those below 0 as 0, and the units."""
    credit = DeferredCredit(config, policy.tokenizer, rows, torch.ones(len(rows)), seed=0)
    credit.by_model(policy.model)
    whole: Any = credit.finished()
    return [drop.clamp(min=0).tolist() for drop in whole.drop], whole.spans


def _correlations(scores: Sequence[Any], truth: Sequence[Any]) -> list[float]:
    """Spearman within each completion in which the truth is not constant."""
    rows = zip(scores, truth, strict=True)
    return [rank_correlation(np.asarray(a), np.asarray(b)) for a, b in rows if len({*b}) > 1]


def spans(settings: PapersSettings, _: Path) -> Figures:
    """Share of a completion's importance by CF that k spans hold: the best, any, or those that a rule selects."""
    cells: Any = defaultdict(lambda: defaultdict(list))
    for model, policy, group in _groups(2, settings.groups, settings.groups):
        values, units = _importances(policy, group.rows, CounterfactualConfig(max_spans=64))
        judged = {b: dict(zip(units[b], row, strict=True)) for b, row in enumerate(values) if sum(row) > 1e-3}
        ids = {b: group.rows.completions[b].tolist() for b in judged}
        for k in range(1, 6):
            chosen = {"best": {b: sorted(one, key=one.__getitem__)[-k:] for b, one in judged.items()}}
            for rule in get_args(Selection):
                found = find_reasoning(ids, policy.tokenizer, spans=SpanRules("math", k, rule), answers=AnswerRules())
                chosen[rule] = {b: row.spans for b, row in found.items()}
            for rule, by_row in chosen.items():
                held = [sum(one[span] for span in by_row[b]) / sum(one.values()) for b, one in judged.items()]
                cells[f"{model}, k = {k}"][rule].append(held)
            cells[f"{model}, k = {k}"]["any"].append([min(1.0, k / len(one)) for one in judged.values()])
    return _summed(cells)


def outcomes(settings: PapersSettings, _: Path) -> Figures:
    """Spearman of OAR-G's importances, by one draw, with OAR-P's of the same outcome within a completion."""
    cells: Any = defaultdict(lambda: defaultdict(list))
    for model, policy, group in _groups(3, settings.groups, -(-settings.groups // 4)):
        for outcome in get_args(Outcome):
            exact = CounterfactualConfig(Masking(outcome), units="tokens", weights="bilevel")
            configs = (CounterfactualConfig(Gradient(outcome)), exact)
            rows = [*zip(*(_importances(policy, group.rows, one)[0] for one in configs), strict=True)]
            for name, rewards in {"all": (0, 1), "right": (1,), "wrong": (0,)}.items():
                some = [row for row, reward in zip(rows, group.rewards.tolist(), strict=True) if reward in rewards]
                cells[f"{model}, {outcome}"][name].append(_correlations([a for a, _ in some], [b for _, b in some]))
    return _summed(cells)


def proxies(settings: PapersSettings, folder: Path) -> Figures:
    """Spearman of the importances by the policy before training with the trained one's; p of t-tests over problems."""
    policy, proxy = Policy(_trained(folder, PLAIN, 0, settings)), Policy(MODELS["plain"])
    cells: Any = defaultdict(lambda: defaultdict(list))
    for group, kind in ((one, kind) for one in policy.groups(4, count=settings.groups) for kind in ("CF", "OAR-P")):
        own, before = (_importances(one, group.rows, KINDS[kind])[0] for one in (policy, proxy))
        cells[f"{kind}, before training"]["Spearman"].append(_correlations(before, own))
        cells[f"{kind}, position"]["Spearman"].append(_correlations([range(len(row)) for row in own], own))
    means = {label: [float(np.mean(group)) for group in row["Spearman"] if group] for label, row in cells.items()}
    figures = _summed(cells)
    for label, own in means.items():
        more = paired(own, means[f"{label.split(',')[0]}, position"])
        figures[label] |= {"p": paired(own, [0.0] * len(own))["p"], "less position": more["mean"], "its p": more["p"]}
    return figures


def weights(settings: PapersSettings, _: Path) -> Figures:
    """ESS ratio and top-tenth mass of the weights of completions with an advantage."""
    cells: Any = defaultdict(lambda: defaultdict(list))
    for model, policy, group in _groups(5, settings.groups, -(-settings.groups // 4)):
        advantages = group_advantages(group.rewards, 8)
        for kind, config in KINDS.items() if advantages.any() else ():
            credit = DeferredCredit(config, policy.tokenizer, group.rows, advantages, seed=group.rows.lengths)
            credit.by_model(policy.model)
            rows = credit.weights(advantages.nonzero().flatten().tolist())
            for name, measure in {"ESS ratio": ess_ratio, "top 10 % mass": top_mass}.items():
                cells[f"{model}, {kind}"][name].append([measure(row.tolist()) for row in rows])
    return _summed(cells)


def epochs(_: PapersSettings, __: Path) -> Figures:
    """Spearman of a batch's weights, kept for updates, with those it would get then; credit's share of an update."""
    figures: Figures = {}
    for kind in ("CF", "OAR-G"):
        policy, seconds = Policy(MODELS["plain"]), Counter[str]()
        cells: Any = defaultdict(lambda: defaultdict(list))
        optimizer = torch.optim.AdamW(policy.parameters, lr=2e-4, weight_decay=0.0)
        for turn in range(TURNS):
            batch = _sampled(policy, 100 + turn, Counter())
            kept = _updated(policy, optimizer, *batch, kind, seconds)
            for done in range(1, 5):
                now, _ = _updated(policy, optimizer, *batch, kind, seconds, kept)
                rhos = _correlations(*([row.tolist() for row in rows] for rows in (now, kept[0])))
                cells[f"{kind}, {done} updates"]["Spearman"].append(rhos)
        figures |= {k: row | {"of updates": seconds["credit"] / seconds.total()} for k, row in _summed(cells).items()}
    return figures


def _trained(folder: Path, arm: str, seed: int, settings: PapersSettings) -> AlignmentSettings:
    place = folder / f"{arm}-{seed}"
    if not (place / "checkpoint").exists():
        flags = ["--device=cpu", f"--seed={seed}", f"--max_steps={settings.steps}", f"--eval_steps={settings.steps}"]
        trainer([*ARMS[arm], *flags, "--log_completions=0", "--eval_problems=8", f"--output_dir={place}"])
    return AlignmentSettings(model=str(place / "checkpoint"))


def passes(settings: PapersSettings, folder: Path) -> Figures:
    """pass@k on held-out problems before and after training without and with CF at equal mean weight."""
    values: dict[str, np.ndarray] = {}  # (k, problems)
    for arm, seeds in {"before": 1, PLAIN: SEEDS, "counterfactual": SEEDS}.items():
        right = []
        for seed in range(seeds):
            policy = Policy(MODELS["plain"] if arm == "before" else _trained(folder, arm, seed, settings))
            held_out = one_page.load(one_page.Settings(held_out=4 * settings.groups), policy.tokenizer)[1]
            torch.manual_seed(seed)
            parts = (held_out[i : i + 16] for i in range(0, len(held_out), 16))
            rewards = [policy.answered([one for one in part for _ in range(SAMPLES)])[1] for part in parts]
            right.append(np.reshape([*chain(*rewards)], (-1, SAMPLES)).sum(1).astype(int).tolist())
        values[arm] = np.mean([[[pass_at(k, n, SAMPLES) for n in row] for row in right] for k in (1, 2, 4, 8)], axis=1)
    values["counterfactual less plain"] = values["counterfactual"] - values[PLAIN]
    rows = {arm: [mean_interval(row[:, None].tolist()) for row in part] for arm, part in values.items()}
    return {arm: {f"pass@{2**i}": figure for i, figure in enumerate(row)} for arm, row in rows.items()}


TABLES = {work.__name__: work for work in (stages, spans, outcomes, proxies, weights, epochs, passes)}


def run(pieces: Pieces, folder: Path, settings: PapersSettings) -> dict[str, Any]:
    """Make the tables, a piece each."""
    return {name: pieces.get(name, lambda: work(settings, folder)) for name, work in TABLES.items()}  # noqa: B023


def markdown(document: dict[str, Any]) -> str:
    """The tables of the command."""
    parts = [f"# Smaller tables of the papers\n\n{made_by(document)}.\n"]
    for name, work in TABLES.items():
        columns = list(next(iter(document[name].values())))
        cells = [[row[one] for one in columns] for row in document[name].values()]
        texts = [[f"{x:.3g}" if isinstance(x, float | int) else interval(x) for x in row] for row in cells]
        lines = [[label, *row] for label, row in zip(document[name], texts, strict=True)]
        parts += [f"## {name}\n\n{work.__doc__}\n", table(["", *columns], lines)]
    return "\n".join(parts)
