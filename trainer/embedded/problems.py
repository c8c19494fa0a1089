"""Generate word problems in GSM8K's form: several arithmetic steps, idle facts, a final `#### N`.

Problems are drawn from a seed. A problem's arithmetic decides whether it is held out, so splits never share one.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SPLITS = ("train", "test")

_PEOPLE = (
    ("Mia", "She", "her"), ("Anna", "She", "her"), ("Lily", "She", "her"), ("Emma", "She", "her"),
    ("Sara", "She", "her"), ("Nora", "She", "her"), ("Ruth", "She", "her"), ("Ella", "She", "her"),
    ("Tom", "He", "his"), ("Ben", "He", "his"), ("Sam", "He", "his"), ("Leo", "He", "his"),
    ("Max", "He", "his"), ("Jack", "He", "his"), ("Paul", "He", "his"), ("Omar", "He", "his"),
)  # fmt: skip
_THINGS = ("apples", "marbles", "stickers", "books", "coins", "cards", "shells", "pencils", "stamps", "beads")
_WARES = ("pens", "cakes", "hats", "toys", "plants", "cups", "kites", "lamps")


class Step(NamedTuple):
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


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
}


@dataclass(frozen=True)
class Problem:
    """A question, the steps that solve it, and the facts it mentions for no purpose."""

    question: str
    steps: tuple[Step, ...]
    idle: tuple["IdleFact", ...]

    @property
    def answer(self) -> int:
        """The number the question asks for."""
        return self.steps[-1].result

    def solution(self) -> str:
        """Worked solution ending in `#### N`."""
        return _write(self.steps)

    def careless_solution(self, rng: random.Random) -> str:
        """A solution as a careless pupil writes it: the last sum may take its number from an idle fact.

        Facts that count things mislead four times in five, facts that measure something else once in five.
        """
        *first, last = self.steps
        facts = [fact for fact in self.idle if last.op == "+" or (last.op == "-" and fact.number < last.left)]
        if facts:
            fact = max(facts, key=lambda fact: fact.misleading)
            if rng.random() < fact.misleading:
                last = last._replace(right=fact.number)
        return _write([*first, last])


class IdleFact(NamedTuple):
    """A sentence with a number that no step needs, and how often it misleads a careless pupil."""

    sentence: str
    number: int
    misleading: float


def _write(steps: Sequence[Step]) -> str:
    lines = [f"{step.lead} {step.left}{step.op}{step.right}={step.result} {step.tail}." for step in steps]
    return "\n".join([*lines, f"#### {steps[-1].result}"])


class _Story(NamedTuple):
    """Sentences of a problem in order, the question that closes it, and its steps."""

    sentences: list[str]
    question: str
    steps: list[Step]


def _collecting(rng: random.Random) -> _Story:
    """One person's things grow and shrink."""
    (name, she, _), (friend, _, _) = rng.sample(_PEOPLE, 2)
    thing = rng.choice(_THINGS)
    have = rng.randint(5, 40)
    sentences, steps = [f"{name} has {have} {thing}."], []
    for _ in range(rng.randint(2, 3)):
        if have > 12 and rng.random() < 0.5:
            change = rng.randint(2, have - 2)
            event = rng.choice((f"{she} gives {change} {thing} to {friend}.", f"{she} loses {change} of them."))
            step = Step("This leaves", have, "-", change, thing)
        else:
            change = rng.randint(2, 40)
            event = rng.choice((f"{she} buys {change} more.", f"{friend} gives {name} {change} {thing}."))
            step = Step("That makes", have, "+", change, thing)
        sentences.append(event)
        steps.append(step)
        have = step.result
    return _Story(sentences, f"How many {thing} does {name} have now?", steps)


def _comparing(rng: random.Random) -> _Story:
    """Several people own things in stated relations; how many together?"""
    people = rng.sample(_PEOPLE, 3)
    thing = rng.choice(_THINGS)
    counts = [rng.randint(4, 30)]
    sentences, steps = [f"{people[0][0]} has {counts[0]} {thing}."], []
    for i in range(1, rng.randint(2, 3)):
        name, before, other = people[i][0], people[i - 1][0], counts[-1]
        kind = rng.choice("+-*" if other < 20 else "+-")
        if kind == "*":
            by = rng.randint(2, 4)
            how = {2: "twice", 3: "three times", 4: "four times"}[by]
            sentences.append(f"{name} has {how} as many {thing} as {before}.")
        elif kind == "+" or other < 6:
            kind, by = "+", rng.randint(2, 30)
            sentences.append(f"{name} has {by} more {thing} than {before}.")
        else:
            by = rng.randint(2, other - 2)
            sentences.append(f"{name} has {by} fewer {thing} than {before}.")
        steps.append(Step(f"{name} has", other, kind, by, thing))
        counts.append(steps[-1].result)
    total = counts[0]
    for count in counts[1:]:
        steps.append(Step("Together that is", total, "+", count, thing))
        total = steps[-1].result
    return _Story(sentences, f"How many {thing} do they have together?", steps)


def _shopping(rng: random.Random) -> _Story:
    """Two kinds of goods are bought; how much is spent, or left?"""
    name, she, _ = rng.choice(_PEOPLE)
    first, second = rng.sample(_WARES, 2)
    n, m = rng.randint(2, 9), rng.randint(2, 9)
    price, other_price = rng.randint(2, 9), rng.randint(2, 9)
    steps = [
        Step(f"The {first} cost", n, "*", price, "dollars"),
        Step(f"The {second} cost", m, "*", other_price, "dollars"),
    ]
    steps.append(Step(f"{she} spends", steps[0].result, "+", steps[1].result, "dollars"))
    sentences = [
        f"{name} buys {n} {first} for ${price} each.",
        f"{she} also buys {m} {second} for ${other_price} each.",
    ]
    question = f"How many dollars does {name} spend?"
    if rng.random() < 0.5:
        money = steps[-1].result + rng.randint(2, 40)
        sentences.insert(0, f"{name} has ${money}.")
        steps.append(Step("That leaves", money, "-", steps[-1].result, "dollars"))
        question = f"How many dollars does {name} have left?"
    return _Story(sentences, question, steps)


def _packing(rng: random.Random) -> _Story:
    """Boxes are filled, some things break, friends share the rest."""
    name, she, _ = rng.choice(_PEOPLE)
    thing = rng.choice(_THINGS)
    boxes, each, friends = rng.randint(3, 9), rng.randint(4, 9), rng.randint(2, 6)
    total = boxes * each
    share = rng.randint(1, max(1, (total - 1) // friends))
    broken = total - friends * share
    steps = [Step("The boxes hold", boxes, "*", each, thing)]
    sentences = [f"{name} fills {boxes} boxes with {each} {thing} each."]
    if broken:
        sentences.append(f"{broken} {thing} are broken and thrown away.")
        steps.append(Step("This leaves", total, "-", broken, thing))
    sentences.append(f"{she} shares the rest equally among {friends} friends.")
    steps.append(Step("Each friend gets", total - broken, "/", friends, thing))
    return _Story(sentences, f"How many {thing} does each friend get?", steps)


def _earning(rng: random.Random) -> _Story:
    """Hours, days and pay, then an expense."""
    name, she, _ = rng.choice(_PEOPLE)
    hours, days, pay = rng.randint(2, 6), rng.randint(2, 5), rng.randint(2, 9)
    steps = [Step(f"{name} works", hours, "*", days, "hours")]
    steps.append(Step(f"{she} earns", steps[0].result, "*", pay, "dollars"))
    spent = rng.randint(2, steps[1].result - 1)
    steps.append(Step(f"{she} has left", steps[1].result, "-", spent, "dollars"))
    sentences = [
        f"{name} works {hours} hours a day for {days} days.",
        f"{she} is paid ${pay} an hour.",
        f"{she} spends ${spent} of the pay on {rng.choice(_WARES)}.",
    ]
    return _Story(sentences, f"How many dollars does {name} have left?", steps)


_SCENARIOS = (_collecting, _comparing, _shopping, _packing, _earning)


def _idle_fact(rng: random.Random, story: str) -> IdleFact:
    """A fact about people and things that `story` does not mention."""
    name, _, her = rng.choice([person for person in _PEOPLE if person[0] not in story])
    thing = rng.choice([thing for thing in _THINGS + _WARES if thing not in story])
    number = rng.randint(2, 40)
    counting = (
        f"{name} saw {number} {thing} at the fair.",
        f"{name} sold {number} {thing} yesterday.",
        f"{name} put {number} {thing} in {her} room last year.",
    )
    measuring = (f"{name} is {number} years old.", f"The shop is {number} miles away.")
    sentence = rng.choice(counting + measuring)
    return IdleFact(sentence, number, misleading=0.8 if sentence in counting else 0.2)


def _split_of(steps: list[Step]) -> str:
    """Say whether a problem is held out (one in eight), by its arithmetic only: names and idle facts do not matter."""
    chain = ";".join(f"{left}{op}{right}" for _, left, op, right, _ in steps)
    return "test" if hashlib.sha256(chain.encode()).digest()[0] % 8 == 0 else "train"


def generate(split: str, seed: int, *, distractors: float = 0.5) -> Iterator[Problem]:
    """Yield an endless stream of problems of one split (`"train"` or `"test"`), fixed by `seed`.

    Up to two idle facts are added, each with probability `distractors`.
    Raises `ValueError` for an unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
    rng = random.Random(f"{split}-{seed}")
    while True:
        sentences, question, steps = rng.choice(_SCENARIOS)(rng)
        if _split_of(steps) != split:
            continue
        idle = []
        for _ in range(2):
            if rng.random() < distractors:
                idle.append(_idle_fact(rng, " ".join(sentences)))
                sentences.insert(rng.randint(1, len(sentences)), idle[-1].sentence)
        yield Problem(" ".join([*sentences, question]), tuple(steps), tuple(idle))
