"""Make word problems of which a known share of the completion can matter, and the one model that solves them all.

A regime is a kind of completion: how many idle sentences stand between its steps, of which kind, and whether every step
may go wrong. The prompt asks for it, so regimes differ in nothing else: the weights are the same, the problems too.
"""

import itertools
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cfa_kernels.options import check_fields
from examples.problems import WordProblem, generate
from trainer.data import Row

ASSETS = Path(__file__).parent / "assets"
"""The model, which README.md says how it was made."""

_SET = (
    "Let us take our time with this.", "It is good to read the text with care.", "We go on from here step by step.",
    "There is no need to hurry at all.", "That was not hard to see.", "So far this looks fine to me.",
    "It helps to keep things in order.", "Now let us think about what comes next.", "I like problems of this kind.",
    "We should not forget what is asked.", "Well, that is how it goes.", "All of this was told in the text.",
)  # fmt: skip
_FREE = (
    "Often Perhaps Today Surely Clearly Somehow Maybe Indeed",
    "old small happy green quiet clever young tired",
    "dog teacher river garden farmer window bird story",
    "sees likes finds follows watches leaves knows helps",
    "new big lovely strange warm simple bright lost",
    "house road song boat friend letter tree market",
)
_DECOYS = "apples marbles stickers books coins cards shells pencils stamps beads"
WORDS = {"set": "Talk", "free": "Chat", "decoys": "Doodle"}
"""How a prompt asks for idle sentences: out of twelve, of words drawn freely, or computations that nothing reads."""


@dataclass(frozen=True)
class Regime:
    """A kind of completion.

    Attributes:
        sentences: idle ones, a line each, anywhere before the answer.
        kind: of them, a key of `WORDS`.
        hurried: every step takes a wrong operand at times, not the last alone.
        max_tokens: room for a completion.
    """

    sentences: int = 0
    kind: str = "set"
    hurried: bool = False
    max_tokens: int = 96

    def question(self, problem: WordProblem) -> str:
        """The problem's text, and what the prompt asks for besides."""
        talk = f" {WORDS[self.kind]} {self.sentences}." if self.sentences else ""
        return f"{problem.question}{' Hurry.' if self.hurried else ''}{talk}"

    def solution(self, problem: WordProblem, rng: random.Random) -> str:
        """The solution with idle lines at random places; where hurried, with wrong operands."""
        if self.hurried:
            problem = _hurried(problem, rng)
        *steps, answer = problem.solution().split("\n")
        places = sorted(rng.randrange(len(steps) + 1) for _ in range(self.sentences))
        for place in reversed(places):
            steps.insert(place, _idle(self.kind, rng))
        return "\n".join([*steps, answer])


REGIMES = {
    "plain": Regime(),
    "idle8": Regime(8, max_tokens=224),
    "idle24": Regime(24, max_tokens=448),
    "idle90": Regime(90, max_tokens=1200),
    "free8": Regime(8, "free", max_tokens=288),
    "decoys8": Regime(8, "decoys", max_tokens=288),
    "hurried": Regime(hurried=True),
    "hurried8": Regime(8, hurried=True, max_tokens=224),
}


def check(settings: Any) -> None:
    """Reject values outside their range, and a regime that there is not, naming the setting."""
    check_fields(settings)
    if settings.regime and settings.regime not in REGIMES:
        raise ValueError(f"regime must be one of {', '.join(REGIMES)}, got {settings.regime!r}")


def problems(regime: Regime, split: str, seed: int, count: int) -> list[Row]:
    """Rows with `question` and `answer`, the right solution."""
    some = itertools.islice(generate(split, seed), count)
    return [Row({"question": regime.question(one), "answer": one.solution()}) for one in some]


def density(regime: Regime, tokenizer: Any, count: int = 200) -> float:
    """Share of a solution's tokens that are in its steps and its answer, over some problems."""
    rng, tokens = random.Random(0), [0, 0]
    for problem in itertools.islice(generate("test", 0), count):
        for i, text in enumerate((problem.solution(), regime.solution(problem, rng))):
            tokens[i] += len(tokenizer(text)["input_ids"])
    return tokens[0] / tokens[1]


def _idle(kind: str, rng: random.Random) -> str:
    if kind == "free":
        first, *rest = (rng.choice(words.split()) for words in _FREE)
        return f"{first} the {rest[0]} {rest[1]} {rest[2]} the {rest[3]} {rest[4]}."
    if kind == "decoys":
        left, right = rng.randint(3, 40), rng.randint(2, 9)
        op, result = rng.choice([("+", left + right), ("-", left - right), ("*", left * right)])
        return f"We also see {left}{op}{right}={result} {rng.choice(_DECOYS.split())}."
    return rng.choice(_SET)


def _hurried(problem: WordProblem, rng: random.Random) -> WordProblem:
    """The problem as one solves it who misreads an operand of a sixth of the steps; what follows reads the result."""
    steps, read = [], dict[int, int]()
    for step in problem.steps:
        left, right = read.get(step.left, step.left), read.get(step.right, step.right)
        if step.op in "+-" and rng.random() < 1 / 6:
            right += rng.choice([1, 10]) if step.op == "+" or right + 10 < left else 0
        wrong = step._replace(left=left, right=right)
        if wrong.result != step.result:
            read[step.result] = wrong.result
        steps.append(wrong)
    return replace(problem, steps=tuple(steps))
