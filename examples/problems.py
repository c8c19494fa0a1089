"""Generate word problems in GSM8K's form: several arithmetic steps, idle facts, a final `#### N`.

Problems are drawn from a seed. A problem's arithmetic decides whether it is held out, so splits never share one.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import add, floordiv, mul, sub
from typing import NamedTuple

_WOMEN, _MEN = "Mia Anna Lily Emma Sara Nora Ruth Ella", "Tom Ben Sam Leo Max Jack Paul Omar"
_PEOPLE = [(name, "She", "her") for name in _WOMEN.split()] + [(name, "He", "his") for name in _MEN.split()]
_THINGS = ("apples", "marbles", "stickers", "books", "coins", "cards", "shells", "pencils", "stamps", "beads")
_TIMES = {2: "twice", 3: "three times", 4: "four times"}
_WARES = ("pens", "cakes", "hats", "toys", "plants", "cups", "kites", "lamps")


_OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul, "/": floordiv}


class Calculation(NamedTuple):
    """One line of a solution: `lead left op right = result tail`."""

    lead: str
    left: int
    op: str
    right: int
    tail: str

    @property
    def result(self) -> int:
        """Value of `left op right`."""
        return _OPERATIONS[self.op](self.left, self.right)


@dataclass(frozen=True)
class WordProblem:
    """A question, which may state facts that no step needs, and the steps that solve it."""

    question: str
    steps: tuple[Calculation, ...]

    @property
    def answer(self) -> int:
        """The number the question asks for."""
        return self.steps[-1].result

    def solution(self) -> str:
        """Worked solution ending in `#### N`."""
        lines = [f"{step.lead} {step.left}{step.op}{step.right}={step.result} {step.tail}." for step in self.steps]
        return "\n".join([*lines, f"#### {self.answer}"])


_Story = tuple[list[str], str, list[Calculation]]
"""Sentences of a problem in order, the question that closes it, and its steps."""


def _collecting(rng: random.Random) -> _Story:
    """One person's things grow and shrink."""
    (name, she, _), (friend, _, _) = rng.sample(_PEOPLE, 2)
    thing, have = rng.choice(_THINGS), rng.randint(5, 40)
    sentences, steps = [f"{name} has {have} {thing}."], []
    for _ in range(rng.randint(2, 3)):
        if have > 12 and rng.random() < 0.5:
            change = rng.randint(2, have - 2)
            events = f"{she} gives {change} {thing} to {friend}.", f"{she} loses {change} of them."
            steps.append(Calculation("This leaves", have, "-", change, thing))
        else:
            change = rng.randint(2, 40)
            events = f"{she} buys {change} more.", f"{friend} gives {name} {change} {thing}."
            steps.append(Calculation("That makes", have, "+", change, thing))
        sentences.append(rng.choice(events))
        have = steps[-1].result
    return sentences, f"How many {thing} does {name} have now?", steps


def _comparing(rng: random.Random) -> _Story:
    """Several people own things in stated relations; how many together?"""
    people, thing, counts = [name for name, *_ in rng.sample(_PEOPLE, 3)], rng.choice(_THINGS), [rng.randint(4, 30)]
    sentences, steps = [f"{people[0]} has {counts[0]} {thing}."], []
    for i in range(1, rng.randint(2, 3)):
        name, before, other = people[i], people[i - 1], counts[-1]
        kind = rng.choice("+-*" if other < 20 else "+-")
        if kind == "*":
            by = rng.randint(2, 4)
            sentences.append(f"{name} has {_TIMES[by]} as many {thing} as {before}.")
        elif kind == "+" or other < 6:
            kind, by = "+", rng.randint(2, 30)
            sentences.append(f"{name} has {by} more {thing} than {before}.")
        else:
            by = rng.randint(2, other - 2)
            sentences.append(f"{name} has {by} fewer {thing} than {before}.")
        steps.append(Calculation(f"{name} has", other, kind, by, thing))
        counts.append(steps[-1].result)
    total = counts[0]
    for count in counts[1:]:
        steps.append(Calculation("Together that is", total, "+", count, thing))
        total = steps[-1].result
    return sentences, f"How many {thing} do they have together?", steps


def _shopping(rng: random.Random) -> _Story:
    """Two kinds of goods are bought; how much is spent, or left?"""
    name, she, _ = rng.choice(_PEOPLE)
    first, second = rng.sample(_WARES, 2)
    n, m = rng.randint(2, 9), rng.randint(2, 9)
    price, other_price = rng.randint(2, 9), rng.randint(2, 9)
    steps = [Calculation(f"The {first} cost", n, "*", price, "dollars")]
    steps.append(Calculation(f"The {second} cost", m, "*", other_price, "dollars"))
    steps.append(Calculation(f"{she} spends", steps[0].result, "+", steps[1].result, "dollars"))
    sentences = [f"{name} buys {n} {first} for ${price} each."]
    sentences.append(f"{she} also buys {m} {second} for ${other_price} each.")
    question = f"How many dollars does {name} spend?"
    if rng.random() < 0.5:
        money = steps[-1].result + rng.randint(2, 40)
        sentences.insert(0, f"{name} has ${money}.")
        steps.append(Calculation("That leaves", money, "-", steps[-1].result, "dollars"))
        question = f"How many dollars does {name} have left?"
    return sentences, question, steps


def _packing(rng: random.Random) -> _Story:
    """Boxes are filled, some things break, friends share the rest."""
    (name, she, _), thing = rng.choice(_PEOPLE), rng.choice(_THINGS)
    boxes, each, friends = rng.randint(3, 9), rng.randint(4, 9), rng.randint(2, 6)
    total = boxes * each
    share = rng.randint(1, max(1, (total - 1) // friends))
    broken = total - friends * share
    steps = [Calculation("The boxes hold", boxes, "*", each, thing)]
    sentences = [f"{name} fills {boxes} boxes with {each} {thing} each."]
    if broken:
        sentences.append(f"{broken} {thing} are broken and thrown away.")
        steps.append(Calculation("This leaves", total, "-", broken, thing))
    sentences.append(f"{she} shares the rest equally among {friends} friends.")
    steps.append(Calculation("Each friend gets", total - broken, "/", friends, thing))
    return sentences, f"How many {thing} does each friend get?", steps


def _earning(rng: random.Random) -> _Story:
    """Hours, days and pay, then an expense."""
    name, she, _ = rng.choice(_PEOPLE)
    hours, days, pay = rng.randint(2, 6), rng.randint(2, 5), rng.randint(2, 9)
    steps = [Calculation(f"{name} works", hours, "*", days, "hours")]
    steps.append(Calculation(f"{she} earns", steps[0].result, "*", pay, "dollars"))
    spent = rng.randint(2, steps[1].result - 1)
    steps.append(Calculation(f"{she} has left", steps[1].result, "-", spent, "dollars"))
    sentences = [
        f"{name} works {hours} hours a day for {days} days.",
        f"{she} is paid ${pay} an hour.",
        f"{she} spends ${spent} of the pay on {rng.choice(_WARES)}.",
    ]
    return sentences, f"How many dollars does {name} have left?", steps


_SCENARIOS = (_collecting, _comparing, _shopping, _packing, _earning)


def _idle_fact(rng: random.Random, story: str) -> str:
    """A fact about people and things that `story` does not mention."""
    name, _, her = rng.choice([person for person in _PEOPLE if person[0] not in story])
    thing = rng.choice([thing for thing in _THINGS + _WARES if thing not in story])
    number = rng.randint(2, 40)
    facts = (
        f"{name} saw {number} {thing} at the fair.",
        f"{name} sold {number} {thing} yesterday.",
        f"{name} put {number} {thing} in {her} room last year.",
        f"{name} is {number} years old.",
        f"The shop is {number} miles away.",
    )
    return rng.choice(facts)


def _split_of(steps: list[Calculation]) -> str:
    """Say whether a problem is held out (one in eight), by its arithmetic only: names and idle facts do not matter."""
    chain = ";".join(f"{left}{op}{right}" for _, left, op, right, _ in steps)
    return "test" if hashlib.sha256(chain.encode()).digest()[0] % 8 == 0 else "train"


def generate(split: str, seed: int) -> Iterator[WordProblem]:
    """Yield an endless stream of problems of a split, "train" or "test", fixed by `seed`."""
    if split not in ("train", "test"):
        raise ValueError(f"split must be train or test, got {split!r}")
    rng = random.Random(f"{split}-{seed}")
    while True:
        sentences, question, steps = rng.choice(_SCENARIOS)(rng)
        if _split_of(steps) != split:
            continue
        for _ in range(2):
            if rng.random() < 0.5:
                fact = _idle_fact(rng, " ".join(sentences))
                sentences.insert(rng.randint(1, len(sentences)), fact)
        yield WordProblem(" ".join([*sentences, question]), tuple(steps))
