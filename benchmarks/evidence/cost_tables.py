"""Compare the runs of `python -m benchmarks cost`, and print them as tables."""

from collections.abc import Sequence
from typing import Any

from benchmarks.harness.provenance import made_by
from benchmarks.harness.tables import table

Record = dict[str, Any]


def _total(pieces: Sequence[Record], *path: str) -> Record:
    """Sums of a run's figures over the problems that have it."""
    rows = list[Record]()
    for piece in pieces:
        for key in path:
            piece = piece.get(key, {})
        rows += [piece] if piece else []
    return {key: sum(row[key] for row in rows) for key in rows[0]}


def compared(document: Record) -> list[Record]:
    """One row per run: what it took, that of what it is compared with, their ratio, and the target if there is one.

    Ratios of what is cheaper are ours over theirs; of `times` theirs over ours.
    """
    rows = list[Record]()

    def add(name: str, mine: Record, other: str, theirs: Record, draws_of: int = 1, **targets: float) -> None:
        rows.append({"name": name, "beside": other, "draws": draws_of, "targets": targets}
                    | {f"{key}{suffix}": found.get(key) for suffix, found in (("", mine), (" beside", theirs))
                       for key in ("tokens_fed", "branch_rows", "flops", "seconds")})  # fmt: skip

    tokens, spans = document["tokens"], document["spans"]
    for outcome in ("mean", "last"):
        some = [piece for piece in tokens if outcome in piece["packed"]]
        if not some:
            continue
        name = f"OAR-P, `{outcome}`" + ("" if len(some) == len(tokens) else f" ({4 * len(some)} completions)")
        mine = _total(some, "packed", outcome)
        add(name, mine, "a full forward per token", _total(some, "full"), speed=5.0, tokens=0.35)
        add(name, mine, "the same, head on the answer's rows alone", _total(some, "full_needed"))
    mine = _total(spans, "packed", "logprob")
    add("CF", mine, "a full forward per span", _total(spans, "full"))
    add("CF", mine, "the same, head on the answer's rows alone", _total(spans, "full_needed"))
    for name, piece in document["gradients"].items():
        plain = piece["runs"]["plain"]
        for kind, found in piece["runs"].items():
            if kind != "plain":
                add(f"OAR-G, {kind}", found, f"plain forward and backward, {name}", plain, found["draws"], per_draw=1.5)
    runs = document["cheaper"]["runs"]
    for name, found in runs.items():
        if name != "CF":
            add(name, found, "exact CF", runs["CF"], **({"branch_rows": 0.25} if name == "prefix_gain" else {}))
    return rows


def reached(row: Record) -> list[str]:
    """For each target of a row what was measured, what was wanted, and whether it was reached."""
    said = []
    for kind, wanted in row["targets"].items():
        key = {"speed": "seconds", "tokens": "tokens_fed", "per_draw": "seconds"}.get(kind, kind)
        if row[key] is None or row[f"{key} beside"] is None:
            continue
        share = row[key] / row[f"{key} beside"]
        if kind == "speed":
            value, met, text = 1 / share, 1 / share >= wanted, f"{1 / share:.2f} times faster, at least {wanted:g}"
        else:
            value = share / row["draws"] if kind == "per_draw" else share
            label = {"tokens": "of the tokens", "per_draw": "a draw, CPU", "branch_rows": "of the branch rows"}[kind]
            met, text = value <= wanted, f"{value:.2f} {label}, at most {wanted:g}"
        said.append(f"{text}: {'reached' if met else 'missed'}")
    return said


def markdown(document: Record) -> str:
    """The tables."""
    settings, job, machine = document["settings"], document["job"], document["environment"]["device"]
    load, turns = document["load"], settings["turns"]
    rounds = "in one round" if turns == 1 else f"by the median of {turns} rounds"
    lines = [
        "# What credit costs\n",
        f"{made_by(document)}, on one thread of "
        f"{machine['name']} ({machine['cores']} cores, shared: load {load:.1f} when this was written). "
        f"Model {settings['model']} with random weights in float32; {job['completions']} completions ({job['source']}) "
        f"of {job['completion_tokens_mean']:.0f} tokens, prompts of {job['prompt_tokens_mean']:.0f}, "
        f"{job['spans_mean']:.1f} spans each.\n",
        "Seconds are the processor's, of one thread. What is compared was run in turns in one process, the several "
        "comparisons perhaps in several: every token and every span in one round, problem by problem; the rest "
        f"{rounds}. "
        f"Full forwards per token were run for one token in {settings['stride']} of every completion "
        f"({_runs(document)}) and scaled to all of them: forwards of a completion are equally long. Neither they nor "
        "those per span are fed past the last row that predicts the "
        "answer. Operations are multiply-adds, twice: of linear layers, head and visible pairs of attention for "
        "masking, as executed (a processor's attention kernel computes hidden pairs too) in the other tables. Ratios "
        "are ours over theirs.\n",
    ]
    head = ["run", "beside", "tokens fed", "of theirs", "TFLOP", "of theirs", "CPU s", "of theirs", "target"]
    cells = [
        [row["name"], row["beside"], *(cell for key, digits, unit in
          (("tokens_fed", 0, 1), ("flops", 2, 1e12), ("seconds", 1, 1)) for cell in _cells(row, key, digits, unit)),
         "; ".join(reached(row))]
        for row in document["rows"]
    ]  # fmt: skip
    lines.append(table(head, cells))
    lines.append("Branch rows are tokens fed beyond the completions as sampled, which a training step feeds anyhow:\n")
    runs = document["cheaper"]["runs"]
    branches = runs["CF"]["branch_rows"]
    shares = [[name, f"{r['branch_rows']:,}", f"{r['branch_rows'] / branches:.2f}"] for name, r in runs.items()]
    lines.append(table(["run", "branch rows", "of exact CF's"], shares))
    lines.append(
        "Results were held to their definitions first. The definition's own error is that of its float32 run against "
        "float64, where one was made. Knock-outs and OAR-G with noise are held to theirs by the tests.\n"
    )
    keys = ("largest_gap", "own_error", "median_importance", "largest_importance")
    head = [
        "run",
        "numbers compared",
        "largest gap",
        "definition's own error",
        "median number, at most",
        "largest number",
    ]
    checks = [[n, f"{found['compared']:,}", *(f"{found[key]:.1e}" for key in keys)] for n, found in _checks(document)]
    lines.append(table(head, checks))
    return "\n".join(lines)


def _runs(document: Record) -> str:
    run, wanted = (sum(piece["full"][key] for piece in document["tokens"]) for key in ("run", "wanted"))
    return f"{run:,} of {wanted:,} forwards"


def _cells(row: Record, key: str, digits: int, unit: float) -> list[str]:
    mine, theirs = row[key], row[f"{key} beside"]
    if mine is None:
        return ["–", "–"]
    return [f"{mine / unit:,.{digits}f}", f"{mine / theirs:.2f}" if theirs else "–"]


def _checks(document: Record) -> list[tuple[str, Record]]:
    checks = list[tuple[str, Record]]()
    for kind, label in (("tokens", "OAR-P"), ("spans", "CF")):
        by_outcome: dict[str, list[Record]] = {}
        for piece in document[kind]:
            for outcome, found in piece["checked"].items():
                by_outcome.setdefault(outcome, []).append(found)
        for outcome, found in by_outcome.items():
            worst = {key: max(one[key] for one in found) for key in found[0]}
            checks.append((f"{label}, `{outcome}`", worst | {"compared": sum(one["compared"] for one in found)}))
    for name, piece in document["gradients"].items():
        checks += [(f"{check}, {name}", found) for check, found in piece["checked"].items()]
    return checks + list(document["cheaper"]["checked"].items())
