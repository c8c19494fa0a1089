"""`python -m benchmarks evidence ablation`: kinds of credit from the same start, on the same problems, seed by seed.

Each run is the training program in a process of its own, and a piece once it is done, so an interrupted ablation goes
on where it stopped. Arms are paired by seed: a seed fixes problems and samples until policies differ.
"""

import contextlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from scipy import stats

from benchmarks.harness.environment import REPOSITORY
from benchmarks.harness.results import Pieces, made_by, table
from benchmarks.research.regimes import ASSETS, REGIMES, check, problems
from cfa_kernels.options import Count, Interval
from trainer.report.runs import read_metrics

PLAIN, PLACEBO = "plain DAPO", "permuted where right, spans open"

# Every arm at mean weight 1, else the arms would differ by their step sizes; "as the paper" once without. 80/20 is one
# threshold and one denominator for the batch (arXiv 2506.01939): rescaled completion by completion, those with few open
# tokens would weigh as much as those with many. Its kept tokens weigh 1, and Adam takes no notice of the smaller sum.
MEAN = "--normalize=mean"
ARMS: dict[str, tuple[str, ...]] = {
    PLAIN: ("--credit=none",),
    "counterfactual": ("--config=cf", *MEAN),
    "counterfactual, as the paper": ("--config=cf",),
    "inverted": ("--config=cf", "--control=inverted", *MEAN),
    "random": ("--config=cf", "--control=random", *MEAN),
    "OAR-P": ("--config=oar_p", *MEAN),
    "OAR-G": ("--config=oar_g", *MEAN),
    "entropy": ("--estimator=entropy", "--weights=bilevel", *MEAN),
    "80/20": ("--credit=entropy_80_20",),
    "entropy shaping": ("--estimator=entropy_shaping",),
    "prefix_gain": ("--credit=prefix_gain", *MEAN),
    "prefix_tree": ("--credit=prefix_tree",),
    "sibling_edits": ("--estimator=sibling_edits", *MEAN),
    "compare and correct": ("--config=ibpo", *MEAN),
}
SETS = {"credit": list(ARMS)}
RIGHT = "--completions=positive"
ARMS |= {
    "CF where right": (*ARMS["counterfactual"], *RIGHT),
    "prefix gain where right": ("--credit=prefix_gain_positive", "--open_spans=false"),
    "prefix gain where right, spans open": ("--credit=prefix_gain_positive",),
    PLACEBO: ("--credit=prefix_gain_positive", "--control=permuted"),
    "random where right": (*ARMS["random"], *RIGHT),
    "position where right": ("--estimator=benchmarks.research.methods:position", *MEAN, *RIGHT),
}
ARMS["CF where right, spans open"] = (*ARMS["CF where right"], "--open_spans=true")
SETS["training"] = [PLAIN, "CF where right", "position where right", "random where right"]


def arms_named(names: Sequence[str] | None) -> list[str]:
    """The arms of these names and of these names of `SETS`; by default the set "credit".

    Raises:
        ValueError: an unknown name.
    """
    found = [arm for name in names or ["credit"] for arm in SETS.get(name, [name])]
    if unknown := [name for name in found if name not in ARMS]:
        raise ValueError(f"arms must be among {', '.join([*SETS, *ARMS])}, got {', '.join(unknown)}")
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class AblationSettings:
    """Size of the ablation."""

    seeds: Count = 5
    """Runs of each arm, with seeds 0, 1, ...; with rates to try, seeds that follow those of the tuning."""
    regime: str = ""
    """Name in `regimes.REGIMES` of the problems; by default the embedded ones, with the embedded model."""
    model: str = ""
    """Folder of the policy, in place of the embedded model or the regime's."""
    rates: str = ""
    """Learning rates to try for each arm, such as "1e-4 2e-4"; the best, in mean accuracy over steps, is taken.
    One rate alone is taken untried.
    """
    tuning: Count = 3
    """Seeds that each rate is tried with, none of which counts further."""
    steps: Count = 30
    """Steps of a run."""
    inner_steps: Count = 1
    """Optimizer steps on the completions of each step."""
    eval_steps: Count = 10
    """Steps between evaluations."""
    eval_problems: Count = 1024
    """Held-out problems that every evaluation decodes greedily."""
    eval_samples: Annotated[int, Interval(0)] = 0
    """Completions that every evaluation samples of each problem besides, for the accuracy by sampling."""
    jobs: Count = 1
    """Runs at a time, of one thread each."""

    def __post_init__(self) -> None:
        check(self)
        if bad := [rate for rate in self.rates.split() if not _is_rate(rate)]:
            raise ValueError(f"rates must be learning rates above 0, got {bad[0]!r}")


def run(
    pieces: Pieces, folder: Path, settings: AblationSettings, *, arms: Sequence[str] | None = None
) -> dict[str, Any]:
    """Run every arm and seed, then compare.

    Args:
        pieces: the curve of each finished run.
        folder: where runs leave their files.
        settings: how much.
        arms: names in `ARMS`; default all.

    Raises:
        ValueError: an unknown arm.
        RuntimeError: a run that failed; names it and quotes its last lines.
    """
    flags = [
        f"--max_steps={settings.steps}", f"--num_iterations={settings.inner_steps}", "--log_completions=0",
        f"--eval_steps={settings.eval_steps}", "--device=cpu",
        f"--eval_problems={settings.eval_problems}", f"--eval_samples={settings.eval_samples}",
        *_regime(settings, folder), *([f"--model={settings.model}"] if settings.model else []),
    ]  # fmt: skip

    def one(arm: str, seed: int, rate: str = "") -> dict[str, Any]:
        name, own = f"{arm}-seed{seed}{rate and '-'}{rate}", [f"--learning_rate={rate}"] * bool(rate)
        curve: dict[str, Any] = pieces.get(
            name, lambda: _train(folder / name, [*ARMS[arm], *flags, *own, f"--seed={seed}"], settings.steps)
        )
        print(f"{name}: {curve['accuracy'][-1]:.1%} after {curve['seconds'][-1]:.0f} s")
        return curve

    rates, names = settings.rates.split(), arms_named(arms)
    first = settings.tuning if rates else 0
    with ThreadPoolExecutor(settings.jobs) as pool, contextlib.ExitStack() as ended:
        ended.callback(pool.shutdown, cancel_futures=True)  # after a run that failed none begins
        tries = {
            arm: {rate: [pool.submit(one, arm, seed, rate) for seed in range(first)] for rate in rates}
            for arm in (names if len(rates) > 1 else [])
        }
        tuned = dict[str, dict[str, float]]()
        for arm, of in tries.items():
            figures = compare({rate: [run.result() for run in runs] for rate, runs in of.items()})
            tuned[arm] = {rate: one["area"]["mean"] for rate, one in figures.items()}
        best = {arm: max(tuned[arm], key=tuned[arm].__getitem__) if tuned else "".join(rates) for arm in names}
        seeds = range(first, first + settings.seeds)
        runs = {arm: [pool.submit(one, arm, seed, best[arm]) for seed in seeds] for arm in names}
        curves = {arm: [future.result() for future in futures] for arm, futures in runs.items()}
    shown = [flag.replace(f"{REPOSITORY}/", "") for flag in flags]
    compared = {arm: {**figures, "rate": best[arm]} for arm, figures in compare(curves).items()}
    return {"settings": asdict(settings), "flags": shown, "tuned": tuned, "curves": curves, "arms": compared}


def _is_rate(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _regime(settings: AblationSettings, folder: Path) -> list[str]:
    """Flags of a regime's model, problems and room; its problems are written to the folder."""
    if not settings.regime:
        return []
    regime, files = REGIMES[settings.regime], {}
    for name, split, count in (("dataset", "train", 4096), ("eval_dataset", "test", settings.eval_problems)):
        files[name] = folder / f"{settings.regime}-{split}.jsonl"
        lines = [json.dumps(row) + "\n" for row in problems(regime, split, 1, count)]
        files[name].write_text("".join(lines), encoding="utf-8")
    flags = [f"--{name}={file}" for name, file in files.items()]
    flags += ["--generation_batch_size=32", f"--max_completion_length={regime.max_tokens}"]
    return flags if settings.model else [f"--model={ASSETS}", *flags]


def compare(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Figures of each arm, and its paired differences from plain DAPO.

    Args:
        curves: for each arm the curves of its seeds: `step`, `accuracy`, `seconds` and, where completions are sampled
            too, `sampled` of each evaluation, `reward`.

    Returns:
        For each arm `final` and `area` (mean accuracy over steps) and `area_seconds` (over the CPU seconds that the
        quickest arm's whole run takes, held at its last value), each with mean and standard deviation over seeds;
        `reward`, the mean of all completions sampled in training; `sampled`, the `area` by sampling; `seconds` of a
        run; `steps_to_plain`, where the mean curve first reaches plain DAPO's final mean (None if it does not);
        `against_plain`: mean paired differences, their standard error and the two-sided p of a paired t-test.
    """
    horizon = min(curve["seconds"][-1] for arm in curves.values() for curve in arm)
    measures = {
        arm: {
            "final": [curve["accuracy"][-1] for curve in of],
            "area": [_area(curve["step"], curve["accuracy"], curve["step"][-1]) for curve in of],
            "area_seconds": [_area(curve["seconds"], curve["accuracy"], horizon) for curve in of],
            "seconds": [curve["seconds"][-1] for curve in of],
            "reward": [curve["reward"] for curve in of],
            "sampled": [_area(curve["step"], curve["sampled"], curve["step"][-1]) for curve in of if curve["sampled"]],
        }
        for arm, of in curves.items()
    }
    result: dict[str, dict[str, Any]] = {}
    for arm, of in measures.items():
        result[arm] = {name: _spread(values) for name, values in of.items() if values}
        if PLAIN in measures:
            target = statistics.fmean(measures[PLAIN]["final"])
            mean = np.mean([curve["accuracy"] for curve in curves[arm]], axis=0)
            reached = np.flatnonzero(mean >= target)
            result[arm]["steps_to_plain"] = curves[arm][0]["step"][int(reached[0])] if len(reached) else None
            if arm != PLAIN:
                result[arm]["against_plain"] = {
                    name: paired(of[name], measures[PLAIN][name])
                    for name in ("final", "area", "area_seconds", "reward", "sampled")
                    if of[name]
                }
    return result


def paired(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float | None]:
    """Mean of the paired differences, its standard error, and the two-sided p of Student's paired t-test."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean, count = statistics.fmean(differences), len(differences)
    if count < 2:
        return {"mean": mean, "error": None, "p": None}
    error = statistics.stdev(differences) / math.sqrt(count)
    p = float(stats.ttest_rel(ours, theirs).pvalue) if error else float(mean == 0)
    return {"mean": mean, "error": error, "p": p}


def markdown(document: Mapping[str, Any]) -> str:
    """The table of an ablation."""
    settings, arms = document["settings"], document["arms"]
    rows = []
    for arm, figures in arms.items():
        against = figures.get("against_plain")
        rows.append([
            arm, _percent(figures["final"]), _percent(figures["area"]), _percent(figures["area_seconds"]),
            "–" if figures.get("steps_to_plain") is None else str(figures["steps_to_plain"]),
            f"{figures['seconds']['mean']:.0f}", figures.get("rate") or "–",
            *(_difference((against or {}).get(name)) for name in ("final", "area", "reward", "sampled")),
        ])  # fmt: skip
    head = [
        "credit", "final accuracy", "mean over steps", "mean over CPU seconds", "steps to plain's final",
        "CPU seconds of steps", "learning rate", "final, less plain (p)", "mean over steps, less plain (p)",
        "reward in training, less plain (p)", "sampled, mean over steps, less plain (p)",
    ]  # fmt: skip
    return "\n".join([
        "# Ablation of credit\n",
        f"{made_by(document)}. {'Regime ' + settings['regime'] if settings.get('regime') else 'The embedded model'}, "
        f"{settings['steps']} steps{_inner(settings)}, {settings['seeds']} seeds, {settings['eval_problems']} held-out "
        "problems decoded greedily. All arms at mean weight 1 but the one named otherwise and 80/20, whose kept tokens "
        "weigh 1 and the others 0, as in its paper; `prefix_tree` changes advantages, not weights; compare and correct "
        f"raises rewards, too{_corrections(document)}.{_earlier(document)} Plus-minus is one standard deviation over "
        "seeds; differences are paired by seed, with their standard error and the p of a paired t-test. Accuracy in "
        "percent.\n",
        table(head, rows),
        *_beyond_placebo(document),
        *_quarters(document),
    ])  # fmt: skip


def _beyond_placebo(document: Mapping[str, Any]) -> list[str]:
    """What credit gains beyond its placebo, the same importances at other spans, where both were run."""
    curves, credit = document["curves"], "prefix gain where right, spans open"
    if not {credit, PLACEBO} <= curves.keys():
        return []
    less = compare({PLAIN: curves[PLACEBO], credit: curves[credit]})[credit]["against_plain"]
    said = (f"{_difference(less[key])} {text}" for key, text in (("sampled", "by sampling"), ("area", "greedily")))
    return [f"*{credit}* less *{PLACEBO}*, mean over steps (p): {', '.join(said)}.\n"]


def _quarters(document: Mapping[str, Any]) -> list[str]:
    """A table of what runs that noted it did over their steps."""
    rows = []
    for arm, curves in document["curves"].items():
        if all("quarters" in curve for curve in curves):
            means = {name: np.mean([curve["quarters"][name] for curve in curves], axis=0) for name in TRENDS}
            rows.append([arm, *(", ".join(f"{x:.{TRENDS[name][1]}f}" for x in row) for name, row in means.items())])
    head = ["credit", *(title for title, _ in TRENDS.values())]
    note = "By quarters of the steps, means over seeds. *Effective share*: squared mean over mean square.\n"
    return [note, table(head, rows)] if rows else []


def _earlier(document: Mapping[str, Any]) -> str:
    """Say which arms of an older result were run at another commit."""
    commits = document.get("beside", {}).items()
    return f" Runs at other commits: {', '.join(f'{arm} {commit[:12]}' for arm, commit in commits)}." if commits else ""


def _inner(settings: Mapping[str, Any]) -> str:
    return f" with {count} optimizer steps each" if (count := settings.get("inner_steps", 1)) > 1 else ""


def _corrections(document: Mapping[str, Any]) -> str:
    """Describe the corrections of an arm that made some."""
    shares = [c["corrections"] for curves in document["curves"].values() for c in curves if "corrections" in c]
    if not shares:
        return ""
    got, right = (100 * statistics.fmean(share[name] for share in shares) for name in ("fraction", "right_fraction"))
    return f" ({got:.1f} % of completions got a correction, {right:.1f} % of the corrections were right)"


TRENDS = {
    "reward": ("reward", 3), "entropy": ("entropy", 3), "completions/mean_length": ("tokens", 0),
    "ess": ("effective share of the weights", 2),
}  # fmt: skip
"""What a run notes by quarters of its steps, how tables call it, and its digits."""

# One thread each, and a clock of the run's own CPU seconds, which other load on the machine does not stretch.
_RUN = (
    "import ctypes, sys, time; time.perf_counter = time.process_time; "
    "ctypes.CDLL(None).prctl(1, 9); "  # PR_SET_PDEATHSIG: a run does not outlive the ablation
    "from trainer.__main__ import main; sys.exit(main())"
)


def _train(place: Path, flags: list[str], steps: int) -> dict[str, Any]:
    shutil.rmtree(place, ignore_errors=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *flags, f"--output_dir={place}"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{place.name}: {' '.join(done.stderr.splitlines()[-3:])}")
    return _curve(place, steps)


def _curve(place: Path, steps: int) -> dict[str, Any]:
    """Steps, accuracies and CPU seconds of training steps at the evaluations of a finished run.

    Also the mean `reward` over all steps; by quarters of the steps entropy, length and the weights' effective share,
    `ess`; if completions are corrected, the mean shares of completions that got a correction and of right corrections.
    """
    means, shares = ["credit/weight_mean", "credit/weight_std"], ["corrections/fraction", "corrections/right_fraction"]
    names = ["step_time", "eval_accuracy", "eval_pass@1", *TRENDS, *means, *shares]
    metrics = read_metrics(place).reindex(columns=names)
    metrics["seconds"] = metrics["step_time"].fillna(0.0).cumsum()
    metrics["ess"] = 1 / (1 + (metrics["credit/weight_std"] / metrics["credit/weight_mean"]) ** 2)
    done = metrics[metrics["eval_accuracy"].notna()]
    if steps not in done.index[-1:]:
        raise RuntimeError(f"{place.name}: left no evaluation after step {steps}")
    trends = {name: np.array_split(metrics[name].dropna(), 4) for name in TRENDS}
    result = {
        "step": done.index.tolist(), "accuracy": done["eval_accuracy"].tolist(), "seconds": done["seconds"].tolist(),
        "reward": metrics["reward"].mean(), "sampled": done["eval_pass@1"].dropna().tolist(),
        "quarters": {name: [float(part.mean()) for part in parts if len(part)] for name, parts in trends.items()},
    }  # fmt: skip
    corrections = metrics[shares].mean().dropna().rename(lambda name: name.partition("/")[2])
    return result | ({"corrections": corrections.to_dict()} if len(corrections) else {})


def _area(x: Sequence[float], y: Sequence[float], end: float) -> float:
    """Mean of the broken line through (x, y) from x[0] to `end`."""
    inside = [value for value in x if value < end]
    places = [*inside, end]
    return float(np.trapezoid(np.interp(places, x, y), places) / (end - x[0]))


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "deviation": statistics.stdev(values) if len(values) > 1 else 0.0}


def _percent(figure: Mapping[str, float]) -> str:
    return f"{100 * figure['mean']:.1f} ± {100 * figure['deviation']:.1f}"


def _difference(figure: Mapping[str, float | None] | None) -> str:
    if figure is None:
        return "–"
    mean = f"{100 * (figure['mean'] or 0.0):+.1f}"
    return mean if figure["p"] is None else f"{mean} ± {100 * (figure['error'] or 0.0):.1f} ({figure['p']:.2f})"
