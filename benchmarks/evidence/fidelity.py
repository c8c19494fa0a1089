"""`python -m benchmarks evidence fidelity`: measure how close every method is to exact masking, and its cost.

It uses the problems, answers and ledger of `planted`, and compares methods with masking instead of with the truth.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.evidence.agreement import correlation
from benchmarks.evidence.methods import METHODS
from benchmarks.evidence.models import Subject
from benchmarks.evidence.planted import Settings, ask, batches, methods_named
from benchmarks.harness.ledger import Ledger
from benchmarks.harness.provenance import made_by
from benchmarks.harness.tables import interval, table

EXACT = "CF"


def run(
    subject: Subject,
    ledger: Ledger,
    settings: Settings,
    *,
    methods: Sequence[str] | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Do what the ledger does not hold yet and compare.

    Args:
        subject: the trained model.
        methods: names out of `METHODS`, all by default. Exact CF is always asked, and so is what a method approximates.
        say: is told what is being done.

    Returns:
        The document that `markdown` and `plot` show.

    Raises:
        ValueError: an unknown method.
    """
    names = list(dict.fromkeys([EXACT, *(methods or METHODS)]))
    chosen = methods_named(names)
    exact_ones = {chosen[name].approximates for name in chosen} - {None, *chosen}
    chosen |= {name: METHODS[name] for name in METHODS if name in exact_ones}
    everything = list(batches(settings, subject, settings.problems))
    problems = [problem for batch in everything for problem in batch.problems]
    cases = [case for batch in everything for case in batch.cases]
    plain = [len(case.prompt) + case.answer.end - 1 for case in cases]  # tokens of one forward up to the answer
    found, values = dict[str, Any](), dict[str, list[list[float]]]()
    for name, method in chosen.items():
        say(name)
        found[name] = ask(name, method, [subject], ledger, settings, everything)
        values[name] = found[name].pop("values")
    truths = {
        truth: [[float(getattr(unit, truth)) for unit in problem.units] for problem in problems]
        for truth in ("direct", "total")
    }

    def against(name: str, other: Sequence[Sequence[float]]) -> dict[str, Any]:
        count = min(len(values[name]), len(other))
        return correlation(values[name][:count], other[:count], draws=settings.draws)

    for name, record in found.items():
        exact, count = chosen[name].approximates, record["problems"]
        each = (record["tokens_fed"] - sum(plain[:count])) / count if record["tokens_fed"] else 0.0
        record |= {truth: against(name, rows) for truth, rows in truths.items()}
        record |= {
            "approximates": exact,
            "with_cf": against(name, values[EXACT]),
            "with_exact": against(name, values[exact]) if exact in values else None,
            "extra_tokens": each,
        }
    unit = found[EXACT]
    for record in found.values():
        record["token_cost"] = record["extra_tokens"] / unit["extra_tokens"]
        seconds = [one["cpu_seconds"] / one["problems"] for one in (record, unit)]
        record["cpu_cost"] = seconds[0] / seconds[1]
    return {
        "settings": asdict(settings),
        "fingerprint": subject.fingerprint,
        "accuracy": subject.accuracy,
        "plain_tokens": sum(plain) / len(plain),
        "methods": found,
    }


def markdown(document: dict[str, Any]) -> str:
    """The table of `fidelity`."""
    rows = [
        [
            name, found["approximates"] or "", interval(found["with_cf"]), interval(found["with_exact"]),
            interval(found["direct"]), interval(found["total"]), f"{found['extra_tokens']:,.0f}",
            f"{found['token_cost']:.2f}", f"{found['cpu_cost']:.2f}", f"{found['problems']}",
        ]
        for name, found in document["methods"].items()
    ]  # fmt: skip
    return "\n".join(
        [
            "# Fidelity against cost\n",
            f"{made_by(document)}, on the model that solves "
            f"{document['accuracy']:.1%} of held-out problems. Spearman is the mean over problems of the rank "
            "correlation of unit importances, with 95 % bootstrap intervals. Extra tokens are what a method feeds per "
            "completion beyond one plain forward of prompt and completion, and the two costs are those of exact CF "
            "as 1: extra tokens, and all seconds of the processor (which other work on the machine disturbs).\n",
            table(
                ["method", "approximates", "Spearman with CF", "Spearman with what it approximates", "direct truth",
                 "total truth", "extra tokens", "token cost", "CPU cost", "problems"],
                rows,
            ),
        ]
    )  # fmt: skip


def plot(document: dict[str, Any], path: Path) -> Path:
    """Agreement with exact CF, and AUROC against both truths, over extra tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, axes = pyplot.subplots(1, 3, figsize=(15, 4.6))
    panels = [("with_cf", "Spearman with exact CF"), ("direct", "Spearman with the direct truth"),
              ("total", "Spearman with the total truth")]  # fmt: skip
    for axis, (key, title) in zip(axes, panels, strict=True):
        for i, (name, found) in enumerate(document["methods"].items()):
            if found[key].get("value") is not None:
                x, y = max(found["token_cost"], 0.01), found[key]["value"]
                axis.plot(x, y, "o", color=f"C{i % 10}", markersize=4)
                axis.annotate(name, (x, y), fontsize=6, xytext=(3, 3), textcoords="offset points")
        axis.set_xscale("log")
        axis.set_xlabel("extra tokens fed, exact CF = 1 (nothing is drawn at 0.01)")
        axis.set_ylabel(title)
    canvas.tight_layout()
    canvas.savefig(path, dpi=120)
    pyplot.close(canvas)
    return path
