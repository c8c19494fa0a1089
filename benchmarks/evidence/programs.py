"""`python -m benchmarks evidence programs`: which lines of a program get the credit for the value that it returns.

Small programs are asked for in words; some of their lines are idle. Tests reward them; the expected value for one input
is the answer that methods look at. A prompt may ask for each line's value beside it, which then can be read off.
"""

import contextlib
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.evidence.agreement import agreement
from benchmarks.evidence.models import Subject
from benchmarks.evidence.regimes import make
from benchmarks.harness.results import Pieces, interval, made_by, table
from cfa_kernels import CounterfactualConfig, Masking, PrefixGain, Probe, Rows, Span, counterfactual_credit
from trainer import one_page
from trainer.analyze.statistics import bootstrap_interval
from trainer.data import Row, encode_prompt
from trainer.rewards.code import CodeReward
from trainer.rollouts import generate as sample

WORDS = {"+": "add {}", "-": "take {}", "*": "times {}", ">": "wrap at {}"}
"""How a prompt asks for a line, or for a condition: to wrap at a number is to take it from what is larger."""
METHODS = {"CF": Masking(), "CF, total effects": Masking(effect="total"), "prefix gain": PrefixGain()}
KINDS = {"d": "`def`", "i": "idle", "b": "needed before", "l": "needed last", "r": "return", "c": "call"}
"""Of lines: those that the value does not rest on, those that it does, the last that sets it; the call before it."""
AUROCS = {"AUROC, needed": "bli", "AUROC, needed before": "bi"}
NOTES = """Shares of a program's positive credit, in means over programs; AUROC within programs, corrected for position,
of the lines that the value rests on, or of those before the last, against idle ones; all with 95 % bootstrap intervals
over programs. Equal credit shows the shares of lines. Judged are programs that pass, by `--reward_funcs code`."""
RECIPE = {"vocab_size": 512, "single_digits": False, "max_position_embeddings": 256, "max_steps": 3000}
_DO = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


@dataclass(frozen=True)
class ProgramsSettings:
    """Size of the measurement."""

    problems: int = 300
    """Programs that are sampled for each kind of prompt."""
    isolation: str = "bubblewrap"
    """How they are isolated where their tests run."""
    seed: int = 0
    """Seed of problems and draws."""


def executed(program: str, x: int) -> tuple[int, dict[int, int], str]:
    """Run a program as `rows` has: its value, what lines set, kinds of lines; others may end in Value- or KeyError."""
    known, rests, values, runs = {"x": x}, {"x": set[int]()}, dict[int, int](), True
    for i, line in enumerate(program.split("\n")):
        match re.findall(r"\w+|[-+*>]", line.partition("#")[0]):
            case ["if", name, ">", number]:
                runs, rests[name] = known[name] > int(number), rests[name] | {i}
            case ["return", name]:
                last = max(values.keys() & rests[name], default=0)
                kinds = ("l" if k == last else "b" if k in rests[name] else "i" for k in range(1, i))
                return known[name], values, f"d{''.join(kinds)}rc"
            case [name, source, op, number] if runs or not line.startswith(" " * 8):
                known[name] = values[i] = _DO[op](known[source], int(number))
                rests[name] = rests[source] | {i}
    raise ValueError(f"program: returns nothing: {program!r}")


def rows(split: str, seed: int, count: int, slip: float = 0.0) -> Iterator[Row]:
    """Draw a split's rows: `question`, `answer`, `tests`, input `x`; `slip`: the chance of a wrong number in a line."""
    rng = random.Random(f"{split}-{seed}-programs")
    while count:
        chosen = rng.choices("+-*>", (3, 3, 1, 2), k=rng.randint(1, 3))
        steps = [(op, rng.randint(2, 3 if op == "*" else 9)) for op in chosen]
        idle, x, beside = rng.randint(1, 3), rng.randint(0, 9), rng.random() < 0.5
        right, written = (_program(rng, steps, idle, chance) for chance in (0.0, slip))
        value, values, _ = executed(written, x)
        if not all(0 <= number <= 30 for number in [*values.values(), *executed(right, x)[1].values()]):
            continue
        count, lines = count - 1, written.split("\n")
        text = [f"{line}  # {values[i]}" if beside and i in values else line for i, line in enumerate(lines)]
        asked = ", ".join(WORDS[op].format(number) for op, number in steps)
        yield Row({
            "question": f"{asked}. Idle {idle}. Try {x}.{' Values.' if beside else ''}",
            "answer": "\n".join([*text, f"f({x})", f"#### {value}"]),
            "tests": [f"assert f({i}) == {executed(right, i)[0]}" for i in (x, *rng.sample(range(10, 20), 2))],
            "x": x,
        })  # fmt: skip


def _program(rng: random.Random, steps: Sequence[tuple[str, int]], idle: int, slip: float) -> str:
    text, names, known, last = ["def f(x):"], rng.sample("abcdghkmnp", 6), ["x"], "x"
    places, todo = rng.sample(range(len(steps) + idle), idle), list(steps)
    for place in range(len(steps) + idle):
        needed = place not in places
        op, number = todo.pop(0) if needed else (rng.choice("+-"), rng.randint(2, 9))
        number += rng.choice([-1, 1]) * (rng.random() < slip)
        if op == ">":
            text += [f"    if {last} > {number}:", f"        {last} = {last} - {number}"]
            continue
        source, last = last if needed else rng.choice(known), names[-1] if needed else last
        known.append(names.pop())
        text.append(f"    {known[-1]} = {source} {op} {number}")
    return "\n".join([*text, f"    return {last}"])


def train(folder: Path) -> Path:
    """Make the model in `folder`/model, where it is not there: some fifteen minutes of one core."""
    return make(folder, rows("train", 0, 32_000, slip=1 / 6), rows("test", 1, 512), RECIPE)


def run(pieces: Pieces, folder: Path, settings: ProgramsSettings) -> dict[str, Any]:
    """Sample programs of the model in `folder`, made where it is not there, and sum up the credit of right ones."""
    subject = Subject(one_page.Settings(model=str(train(folder))))
    asked = list(rows("test", settings.seed + 2, 3 * settings.problems))
    result: dict[str, Any] = {"settings": asdict(settings)}
    for name in ("without values", "with values"):
        some = [row for row in asked if row["question"].endswith("Values.") == (name == "with values")]
        result[name] = pieces.get(name, lambda: judge(subject, some[: settings.problems], settings))  # noqa: B023
    return result


def judge(subject: Subject, asked: Sequence[Row], settings: ProgramsSettings) -> dict[str, Any]:
    """Sample a program for each row, judge the lines of those that pass their tests, and sum up."""
    keys = [(settings.seed, i) for i in range(len(asked))]
    prompts = [encode_prompt(row["question"], subject.tokenizer) for row in asked]
    texts = sample(subject.model, subject.tokenizer, prompts, max_completion_length=128, keys=keys).texts
    programs = [text.rpartition("\nf(")[0] for text in texts]
    fenced = [f"```\n{program}\n```" for program in programs]
    rewards = CodeReward(isolation=settings.isolation)(completions=fenced, tests=[row["tests"] for row in asked])
    cases, kinds = dict[int, tuple[str, str, str, str]](), list[str]()
    for i, (program, row) in enumerate(zip(programs, asked, strict=True)):
        with contextlib.suppress(ValueError, KeyError):  # of another kind
            value, _, of = executed(program, row["x"])
            if rewards[i] and row["tests"][0].endswith(f" {value}"):
                cases[i], kinds = (program, f"\nf({row['x']})", "\n####", f" {value}"), [*kinds, of]
    if not cases:
        raise ValueError(f"model: none of {len(asked)} programs passes its tests; train it on, or sample more problems")
    own = fmean(texts[i].endswith("".join(case[2:])) for i, case in cases.items())
    result: dict[str, Any] = {"programs": len(cases), "right": fmean(map(bool, rewards)), "own": own}
    result["methods"] = {"equal credit": summary([[1.0] * len(of) for of in kinds], kinds)}
    for name, estimator in METHODS.items():
        cut = 1 if name == "prefix gain" else 2  # it asks after every line, so the call is part of what it asks
        parts = (["".join(case[:cut]), "".join(case[cut:3]), case[3]] for case in cases.values())
        ids = [subject.tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts]
        credit = counterfactual_credit(
            subject.model, subject.tokenizer,
            Rows([torch.tensor(prompts[i]) for i in cases], [torch.tensor(program) for program, _, _ in ids]),
            config=CounterfactualConfig(estimator, detector="sentence", max_spans=16),
            probes=[Probe(torch.tensor(ask + value), Span(len(ask), len(ask + value))) for _, ask, value in ids],
        )  # fmt: skip
        result["methods"][name] = summary([row.tolist() for row in credit.drop], kinds)
        if name == "CF":
            least = credit.base - torch.stack([row.max() for row in credit.drop])
            result |= {"probability": credit.base.exp().mean().item(), "masked": least.exp().mean().item()}
    return result


def summary(values: Sequence[Sequence[float]], kinds: Sequence[str]) -> dict[str, Any]:
    """Sum up credit: shares of the positive by kind of line, AUROC of needed lines, and of those before the last."""
    pairs = [[*zip(of, row, strict=False)] for of, row in zip(kinds, values, strict=True)]
    positive = [[(k, v) for k, v in row if v > 0] for row in pairs]
    result: dict[str, Any] = {}
    for kind, name in KINDS.items():
        shares = [sum(v for k, v in row if k == kind) / sum(v for _, v in row) for row in positive if row]
        result[name] = bootstrap_interval(fmean, shares)._asdict()
    for name, chosen in AUROCS.items():
        some = [[pair for pair in row if pair[0] in chosen] for row in pairs]
        truths = [[k != "i" for k, _ in row] for row in some]
        result[name] = agreement([[v for _, v in row] for row in some], truths)["auroc"]
    return result


def markdown(document: Mapping[str, Any]) -> str:
    """The tables of a measurement."""
    text = [f"# Which lines of a program get the credit for its value\n\n{made_by(document)}. {NOTES}\n"]
    for name in ("without values", "with values"):
        of, names = document[name], [*KINDS.values(), *AUROCS]
        right, own = (f"{100 * of[key]:.1f} %" for key in ("right", "own"))
        text.append(f"""## Prompts {name}\n
{right} of programs pass; of the {of["programs"]} judged, {own} go on with the right value. Its probability is
{of["probability"]:.2f} in the mean, and {of["masked"]:.2f} with the line masked that it loses most by.\n""")
        text.append(table(["", *names], [[m, *(interval(f[k]) for k in names)] for m, f in of["methods"].items()]))
    return "\n".join(text)
