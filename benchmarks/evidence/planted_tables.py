"""Write the results of `planted.py` as Markdown."""

from typing import Any

from benchmarks.evidence.problems import KINDS
from benchmarks.harness.results import interval, made_by, table


def markdown(document: dict[str, Any]) -> str:
    """The tables of `planted`."""
    settings, models = document["settings"], document["models"]
    parts = [
        "# Planted truth\n",
        f"{made_by(document)}. "
        f"{settings['problems']} generated problems with known idle lines, headers, repeated results, wrong steps and "
        "unwritten last computations. *Direct*: the answer's line reads this line. *Total*: the answer rests on it. "
        "AUROC is within a problem and free of position: lines before and lines after count half each, so that a rule "
        "by position alone gets 0.5; the columns called plain are not. In parentheses 95 % bootstrap intervals over "
        "problems. *random* is the mean over many draws of numbers that know nothing, and in parentheses where 95 % of "
        "the draws fall.\n",
    ]
    for name, results in models.items():
        accuracy = (
            f"{len(results['fingerprints'])} with random weights"
            if results["accuracy"] is None
            else f"solves {results['accuracy']:.1%} held out"
        )
        parts.append(f"## The {name} model ({accuracy}; mean answer probability {results['answer_probability']:.2f})\n")
        parts.append(_methods(results["methods"]))
        parts.append("AUROC by kind of problem, direct / total:\n")
        parts.append(_kinds(results["methods"]))
        if "step_values" in results:
            parts.append(_step_values(results, settings))
    return "\n".join(parts)


def _methods(methods: dict[str, Any]) -> str:
    head = ["method", "AUROC direct", "AUROC total", "AUROC wrong step", "Spearman direct", "Spearman total",
            "recall direct", "recall total", "plain AUROC direct", "plain AUROC total", "plain AUROC wrong step",
            "problems", "tokens fed each"]  # fmt: skip
    rows = []
    for name, result in methods.items():
        direct, total = result["direct"], result["total"]
        rows.append(
            [
                name, interval(direct.get("auroc")), interval(total.get("auroc")),
                interval(result["origin"].get("auroc")), interval(direct.get("spearman")),
                interval(total.get("spearman")), interval(direct.get("recall")), interval(total.get("recall")),
                interval(direct.get("plain_auroc")), interval(total.get("plain_auroc")),
                interval(result["origin"].get("plain_auroc")), f"{result['problems']}",
                f"{result['tokens_fed'] / result['problems']:,.0f}",
            ]
        )  # fmt: skip
    return table(head, rows)


def _kinds(methods: dict[str, Any]) -> str:
    def cell(found: dict[str, Any]) -> str:
        return " / ".join("–" if found[truth] is None else f"{found[truth]:.2f}" for truth in ("direct", "total"))

    return table(
        ["method", *KINDS], [[name, *(cell(found["kinds"][k]) for k in KINDS)] for name, found in methods.items()]
    )


def _step_values(results: dict[str, Any], settings: dict[str, Any]) -> str:
    truths = results["step_values"]
    names = list(next(iter(truths.values())))
    own = results["step_values_as_method"]
    return (
        f"### Monte-Carlo step advantage ({settings['samples']} continuations after every line; sampled accuracy "
        f"{results['sampled_accuracy']:.1%})\n\nMean Spearman within problems of importances with the change, at each "
        "line, of the probability that the policy reaches the completion's own answer; last, with the size of the "
        "change of the expected reward. Problems whose steps all have one value are left out: "
        + ", ".join(f"{truth} {row[names[0]]['problems']} used" for truth, row in truths.items())
        + ".\n\n"
        + table(["method", *truths], [[name, *(interval(row[name]) for row in truths.values())] for name in names])
        + f"\nThe step advantage judged as a method: AUROC direct {interval(own['direct'].get('auroc'))}, total "
        f"{interval(own['total'].get('auroc'))}, wrong step {interval(own['origin'].get('auroc'))}.\n"
    )
