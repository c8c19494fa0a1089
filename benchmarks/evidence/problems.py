"""Generate word problems whose solutions carry a planted truth: which lines the answer reads and depends on.

People own numbers of coins that follow from each other; the
question asks for one of them. Nothing but this graph tells a line that matters from one that does not: a computation
on the way to the answer and an idle one read alike.
"""

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SPLITS = ("train", "test")
KINDS = ("idle", "repeat", "wrong", "implicit")
"""Kinds of problems to judge: with only idle lines; also a result stated twice; a wrong step on the way that the rest
follows; a last computation that is not written, so that the answer's line makes it."""

STEP, IDLE_STEP, IDLE_FACT, HEADER, REPEAT = "step", "idle step", "idle fact", "header", "repeat"
ROLES = (STEP, IDLE_STEP, IDLE_FACT, HEADER, REPEAT)

_OWNERS = (
    "Mia", "Anna", "Lily", "Emma", "Sara", "Nora", "Ruth", "Ella", "Tom", "Ben", "Sam", "Leo", "Max", "Jack", "Paul",
    "Omar",
)  # fmt: skip
# Words and signs of a line that computes one quantity from one other. Every line without a computation has as many, so
# that length tells nothing: a header one token longer than a step, and never needed, put length at an AUROC of 0.43.
STEP_WORDS = 23
_HEADERS = (
    "Now let us see what there is to be worked out next from all that we do know, step after step.",
    "Here we go on with the next step of it, and then with the one after that, if there is.",
    "Then there is the rest of it to be found, and what is known will do, so we take it.",
)
_LARGEST = 60


class Quantity(NamedTuple):
    """Number of coins of a person: given, or `left op right` of an earlier quantity and a number or another one."""

    owner: str
    op: str | None = None
    left: int | None = None
    """An earlier quantity, by number; None where it is given."""
    right: int = 0
    """A number, or where `joins` an earlier quantity; the value itself where it is given."""
    joins: bool = False

    @property
    def parents(self) -> tuple[int, ...]:
        """The earlier quantities it is computed from."""
        if self.left is None:
            return ()
        return (self.left, self.right) if self.joins else (self.left,)


class Unit(NamedTuple):
    """One line of a solution: characters `[start, end)` and what is true of them.

    Attributes:
        start, end: the line with its newline.
        role: one of `ROLES`.
        quantity: number of the quantity whose value the line states; None for a header.
        direct: the answer's line takes its number from what this line states.
        total: the answer rests on it: the answer's line reads it, or a line that the answer rests on does.
        origin: the step whose operand was replaced.
    """

    start: int
    end: int
    role: str
    quantity: int | None
    direct: bool
    total: bool
    origin: bool


@dataclass(frozen=True)
class PlantedProblem:
    """A question and one solution of it, right or wrong, line by line.

    Attributes:
        question: the problem's text.
        solution: lines and the closing `#### N`, as a completion would be.
        answer: N, what the solution gives.
        gold: what would be right; differs from `answer` where a step is wrong.
        kind: one of `KINDS`, or "train".
        quantities: in an order in which each follows from earlier ones.
        target: the quantity asked for.
        units: the lines before the answer's.
    """

    question: str
    solution: str
    answer: int
    gold: int
    kind: str
    quantities: tuple[Quantity, ...]
    target: int
    units: tuple[Unit, ...]


class _Line(NamedTuple):
    role: str
    quantity: int | None
    text: str


def generate(split: str, seed: int, *, kinds: Sequence[str] = KINDS) -> Iterator[PlantedProblem]:
    """Yield an endless stream of problems to judge estimators by, the kinds in turn, fixed by `seed`.

    Each has at least one idle computation among its lines. None follows from the quantity asked for, and no two
    quantities are equal, so a number tells whose it is.

    Raises:
        ValueError: an unknown split or kind.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"kinds must be among {KINDS}, got {kind!r}")
    rng = _stream(split, seed, "judged")
    while True:
        for kind in kinds:
            problem = None
            while problem is None:
                problem = _judged(rng, split, kind)
            yield problem


def training_rows(
    split: str, seed: int, count: int, *, cut: float = 0.1, implicit: float = 0.1
) -> list[dict[str, str]]:
    """`count` right solutions to learn from, as rows with `question` and `answer`.

    Idle lines, headers and repeats come at random. A share `cut` of the solutions breaks off after a random line and
    gives the answer at once, so that a model learns how likely an answer is before it has been worked out; a share
    `implicit` leaves out nothing but the lines that state the answer.

    Raises:
        ValueError: an unknown split.
    """
    rng, rows = _stream(split, seed, "training"), list[dict[str, str]]()
    while len(rows) < count:
        drawn = _draw(rng, split)
        if drawn is None:
            continue
        quantities, target = drawn
        values = values_of(quantities)
        shown = [i for i in _idle(quantities, target) if rng.random() < 0.7]
        lines = _lines(rng, quantities, target, values, shown, header=rng.random() < 0.2, repeat=rng.random() < 0.25)
        shortened = rng.random()
        if shortened < cut:
            lines = lines[: rng.randrange(len(lines))]
        elif shortened < cut + implicit:
            lines = [line for line in lines if line.quantity != target]
        text = "".join(f"{line.text}\n" for line in lines)
        rows.append({"question": _question(quantities, target), "answer": f"{text}#### {values[target]}"})
    return rows


def values_of(quantities: Sequence[Quantity]) -> list[int]:
    """The value of each quantity."""
    values: list[int] = []
    for quantity in quantities:
        if quantity.left is None:
            values.append(quantity.right)
        else:
            right = values[quantity.right] if quantity.joins else quantity.right
            values.append(_apply(quantity.op, values[quantity.left], right))
    return values


def ancestors(quantities: Sequence[Quantity], target: int) -> set[int]:
    """The quantities that `target` follows from, itself included."""
    result, todo = {target}, [target]
    while todo:
        for parent in quantities[todo.pop()].parents:
            if parent not in result:
                result.add(parent)
                todo.append(parent)
    return result


def _stream(split: str, seed: int, purpose: str) -> random.Random:
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
    return random.Random(f"{split}-{seed}-{purpose}")


def _apply(op: str | None, left: int, right: int) -> int:
    return left * right if op == "*" else left - right if op == "-" else left + right


def _draw(rng: random.Random, split: str) -> tuple[tuple[Quantity, ...], int] | None:
    """Quantities and the one asked for, or None where the draw does not suit."""
    arguments, derived = rng.randint(1, 2), rng.randint(3, 4)
    owners = rng.sample(_OWNERS, arguments + derived)
    quantities = [Quantity(owner, right=rng.randint(3, 12)) for owner in owners[:arguments]]
    values = [quantity.right for quantity in quantities]
    for owner in owners[arguments:]:
        left = rng.randrange(max(0, len(quantities) - 4), len(quantities))
        op = rng.choice("++--**++--**&")
        if op == "&":
            right = rng.choice([i for i in range(len(quantities)) if i != left] or [left])
            if right == left:
                return None
            quantities.append(Quantity(owner, "+", left, right, joins=True))
        else:
            quantities.append(Quantity(owner, op, left, rng.randint(2, 3) if op == "*" else rng.randint(2, 9)))
        values = values_of(quantities)
        if not 2 <= values[-1] <= _LARGEST:
            return None
    target = rng.randrange(arguments, len(quantities))
    needed = sum(i >= arguments for i in ancestors(quantities, target))
    if not 2 <= needed <= 4 or _split_of(quantities, target) != split:
        return None
    return tuple(quantities), target


def _split_of(quantities: Sequence[Quantity], target: int) -> str:
    """Held out (one in eight) or training, by the arithmetic of the answer only."""
    values, needed = values_of(quantities), sorted(ancestors(quantities, target))
    chain = ";".join(
        f"{values[q.left]}{q.op}{values[q.right] if q.joins else q.right}"
        for q in (quantities[i] for i in needed)
        if q.left is not None
    )
    return "test" if hashlib.sha256(chain.encode()).digest()[0] % 8 == 0 else "train"


def _idle(quantities: Sequence[Quantity], target: int) -> list[int]:
    """Computed quantities that the answer does not need."""
    needed = ancestors(quantities, target)
    return [i for i, quantity in enumerate(quantities) if quantity.left is not None and i not in needed]


def _judged(rng: random.Random, split: str, kind: str) -> PlantedProblem | None:
    drawn = _draw(rng, split)
    if drawn is None:
        return None
    quantities, target = drawn
    idle = [i for i in _idle(quantities, target) if target not in ancestors(quantities, i)]
    if not idle:
        return None
    question, gold = _question(quantities, target), values_of(quantities)[target]
    written, origin = quantities, None
    if kind == "wrong":
        origin = rng.choice([i for i in ancestors(quantities, target) if quantities[i].left is not None])
        replaced = _with_wrong_operand(rng, quantities, origin)
        if replaced is None:
            return None
        written = replaced
    values = values_of(written)
    if not all(2 <= value <= _LARGEST for value in values) or len(set(values)) < len(values):
        return None
    if kind == "wrong" and values[target] == gold:
        return None
    shown = sorted(rng.sample(idle, rng.randint(1, min(2, len(idle)))))
    lines = _lines(
        rng, written, target, values, shown, header=rng.random() < 0.5, repeat=kind == "repeat", wrong=origin
    )
    if kind == "implicit":
        lines = [line for line in lines if line.quantity != target]
    return _problem(question, lines, quantities, target, values[target], gold, kind, origin)


def _with_wrong_operand(rng: random.Random, quantities: Sequence[Quantity], origin: int) -> tuple[Quantity, ...] | None:
    """The same quantities with another number in place of the right operand of `origin`."""
    quantity = quantities[origin]
    if quantity.joins:
        return None
    choices = [n for n in (range(2, 5) if quantity.op == "*" else range(2, 10)) if n != quantity.right]
    changed = list(quantities)
    changed[origin] = quantity._replace(right=rng.choice(choices))
    return tuple(changed)


def _lines(
    rng: random.Random,
    quantities: Sequence[Quantity],
    target: int,
    values: Sequence[int],
    shown: Sequence[int],
    *,
    header: bool,
    repeat: bool,
    wrong: int | None = None,
) -> list[_Line]:
    """The lines of a solution: steps in an order that can be followed, with idle ones and repeats among them."""
    needed = ancestors(quantities, target)
    todo = {i for i in range(len(quantities)) if quantities[i].left is not None and (i in needed or i in shown)}
    for i in shown:  # an idle step can be followed only after what it reads
        todo |= {j for j in ancestors(quantities, i) if quantities[j].left is not None}
    lines = [_Line(STEP if i in needed else IDLE_STEP, i, _step(quantities, values, i)) for i in sorted(todo)]
    if repeat:
        at = rng.choice([k for k, line in enumerate(lines) if line.role == STEP])
        again = lines[at].quantity
        assert again is not None
        text = "So as was worked out before, and it has not changed since then with all that followed it,"
        text = f"{text} {quantities[again].owner} {values[again]}."
        lines.insert(rng.randint(at + 1, len(lines)), _Line(REPEAT, again, text))
    facts = [i for i, quantity in enumerate(quantities) if quantity.left is None and i not in needed]
    if facts and rng.random() < 0.4:
        i = rng.choice(facts)
        text = "We were told in the text, long before there was a question or a step, that at first"
        text = f"{text} {quantities[i].owner} {values[i]}."
        lines.insert(rng.randint(0, len(lines)), _Line(IDLE_FACT, i, text))
    if header:
        lines.insert(rng.randint(0, len(lines)), _Line(HEADER, None, rng.choice(_HEADERS)))
    return lines


def _step(quantities: Sequence[Quantity], values: Sequence[int], i: int) -> str:
    """The relation as the question has it, the numbers, and the result as a given number is stated."""
    owner, op, left, right, joins = quantities[i]
    assert left is not None
    number = values[right] if joins else right
    read = f"{quantities[left].owner} {values[left]}"
    if joins:
        read += f" and {quantities[right].owner} {number}"
    return (
        f"As {_relation(quantities, i)}, and {read}, we find {values[left]}{op}{number}={values[i]}, so {owner} "
        f"{values[i]}."
    )


def _relation(quantities: Sequence[Quantity], i: int) -> str:
    owner, op, left, right, joins = quantities[i]
    assert left is not None
    before = quantities[left].owner
    if joins:
        return f"{owner} gets all of {before} with {quantities[right].owner}"
    how = {"+": "above", "-": "below", "*": "times"}[op or ""]
    return f"{owner} gets {right} {how} {before}"


def _question(quantities: Sequence[Quantity], target: int) -> str:
    """The facts in an order in which each can be followed, and the question."""
    sentences = [
        f"{quantity.owner} {quantity.right}." if quantity.left is None else f"{_relation(quantities, i)}."
        for i, quantity in enumerate(quantities)
    ]
    return " ".join(["Say", *sentences, f"How many coins has {quantities[target].owner}?"])


def _problem(
    question: str,
    lines: Sequence[_Line],
    quantities: tuple[Quantity, ...],
    target: int,
    answer: int,
    gold: int,
    kind: str,
    origin: int | None,
) -> PlantedProblem:
    """Text, positions and truths of the lines."""
    read_by_answer = set(quantities[target].parents) if kind == "implicit" else {target}
    wanted, totals = set(read_by_answer), [False] * len(lines)
    for k in reversed(range(len(lines))):
        quantity = lines[k].quantity
        if quantity is not None and quantity in wanted:
            totals[k] = True
            if lines[k].role in (
                STEP,
                IDLE_STEP,
            ):  # a repeat states a value and reads nothing but its earlier statement
                wanted |= set(quantities[quantity].parents)
    units, text = [], ""
    for line, total in zip(lines, totals, strict=True):
        start = len(text)
        text += f"{line.text}\n"
        units.append(
            Unit(
                start,
                len(text),
                line.role,
                line.quantity,
                direct=line.quantity in read_by_answer,
                total=total,
                origin=line.role == STEP and line.quantity == origin,
            )
        )
    return PlantedProblem(question, f"{text}#### {answer}", answer, gold, kind, quantities, target, tuple(units))
