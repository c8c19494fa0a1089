"""Generate word problems whose solutions carry a planted truth: which lines the answer reads and depends on.

People own numbers of coins that follow from each other; the question asks for one of them. A computation on the way to
the answer and an idle one read alike, and all lines are equally long.
"""

import hashlib
import itertools
import operator
import random
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trainer.data import Row

KINDS = ("idle", "repeat", "wrong", "implicit")
"""Kinds of problems to judge: with only idle lines; also a result stated twice; a wrong step on the way that the rest
follows; a last computation that is not written, so that the answer's line makes it."""

LENGTH, WORDS = 33, re.compile(r" (?=\d)|\d|[^\W\d_]+|[^\w\s]")
"""Words, signs and digits of every line, so that length tells nothing, as the model's tokenizer cuts them."""

_OWNERS = "Mia Anna Lily Emma Sara Nora Ruth Ella Tom Ben Sam Leo Max Jack Paul Omar"
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
_RELATIONS = {"": "={}", "+": " gets {} above {}", "-": " gets {} below {}", "*": " gets {} times {}",
              "/": " gets half of {1}"}  # fmt: skip
_PADDING = {0: "", 1: "Now ", 6: "From here we can see that ", 7: "Now from here we can see that "}
_FACT, _REPEAT, *_HEADERS = (
    "We were told in the text, long before there was a question or a step of any kind, that at first and with nothing "
    "done yet {}={}.",
    "Therefore, as it was worked out before, and it has not changed since then with all that followed it in the lines "
    "up to here, {}={}.",
    "Step {}: we go on with what is known from the text and from the lines above, take it as it stands, and see what "
    "follows from it.",
    "Let x be the number of coins that is asked for, which we do not know as yet, and which is to be found in the end "
    "by what follows.",
)

_Line = tuple[str, int | None, str]  # role, quantity and text, as in `Unit`


class Quantity(NamedTuple):
    """Number of coins of a person: given, or by `op` of one earlier quantity and a number, or of two earlier ones."""

    owner: str
    op: str
    reads: tuple[int, ...]  # numbers of the earlier ones
    number: int  # the second operand; the value of one that is given


class Unit(NamedTuple):
    """What is true of a line of a solution."""

    role: str  # "step", "idle step", "idle fact", "header" or "repeat"
    quantity: int | None  # whose value the line states; None for a header
    direct: bool  # the answer's line takes its number from what this line states
    total: bool  # the answer rests on it: the answer's line reads it, or a line that the answer rests on does
    origin: bool  # its operand was replaced


class PlantedProblem(NamedTuple):
    """A question and one solution of it, right or wrong: lines, the `units`, then `#### N`, as in a completion."""

    question: str
    solution: str
    answer: int  # N
    gold: int  # what would be right
    kind: str  # one of `KINDS`
    quantities: tuple[Quantity, ...]
    units: tuple[Unit, ...]


def generate(split: str, seed: int, *, kinds: Sequence[str] = KINDS) -> Iterator[PlantedProblem]:
    """Yield an endless stream of problems to judge estimators by, the kinds in turn, fixed by `seed`.

    Each has at least one idle computation among its lines. No two quantities are equal, so a number tells whose it is.
    """
    rng = random.Random(f"{split}-{seed}-judged")
    for kind in itertools.cycle(kinds):
        while (problem := _judged(rng, split, kind)) is None:
            pass
        yield problem


def training_rows(split: str, seed: int, count: int, *, short: float = 0.1) -> Iterator[Row]:
    """Yield `count` right solutions to learn from, as rows with `question` and `answer`; idle lines come at random.

    A share `short` of the solutions breaks off after a random line and gives the answer at once, so that a model
    learns how likely an answer is before it has been worked out; as many leave out the lines that state the answer.
    """
    rng = random.Random(f"{split}-{seed}-training")
    for _ in range(count):
        quantities, target = _draw(rng, split)
        idle = [i for i in _idle(quantities, target) if rng.random() < 0.7]
        lines = _lines(rng, quantities, target, idle, header=rng.random() < 0.2, repeat=rng.random() < 0.25)
        if (shortened := rng.random()) < short:
            lines = lines[: rng.randrange(len(lines))]
        elif shortened < 2 * short:
            lines = [line for line in lines if line[1] != target]
        answer = "".join([*(text for _, _, text in lines), f"#### {values_of(quantities)[target]}"])
        yield Row({"question": _question(quantities, target), "answer": answer})


def values_of(quantities: Sequence[Quantity]) -> list[int]:
    """The value of each quantity."""
    values: list[int] = []
    for _, op, reads, number in quantities:
        values.append(_OPERATIONS[op](*[*(values[i] for i in reads), number][:2]) if reads else number)
    return values


def ancestors(quantities: Sequence[Quantity], i: int) -> set[int]:
    """The quantities that quantity `i` follows from, itself included."""
    return {i}.union(*(ancestors(quantities, j) for j in quantities[i].reads))


def _valid(quantities: Sequence[Quantity]) -> bool:
    """Whether values have two digits each and differ, and every half is whole."""
    values = values_of(quantities)
    odd = any(quantity.op == "/" and values[quantity.reads[0]] % quantity.number for quantity in quantities)
    return not odd and len(set(values)) == len(values) and all(10 <= value <= 99 for value in values)


def _draw(rng: random.Random, split: str) -> tuple[tuple[Quantity, ...], int]:
    """Quantities and the one asked for; one in eight is held out, by the arithmetic of the answer only."""
    while True:
        given = rng.randint(1, 2)
        owners = rng.sample(_OWNERS.split(), given + rng.randint(3, 4))
        quantities: list[Quantity] = []
        while len(quantities) < len(owners):
            known = len(quantities)
            op = rng.choice("++--**//&") if known >= given else ""
            reads = tuple(rng.sample(range(known), min(1 + (op == "&"), known))) if op else ()
            low, high = {"": (10, 40), "*": (2, 3), "/": (2, 2)}.get(op, (2, 9))
            quantity = Quantity(owners[known], "+" if op == "&" else op, reads, rng.randint(low, high))
            if _valid([*quantities, quantity]):
                quantities.append(quantity)
        target, values = rng.randrange(given, len(quantities)), values_of(quantities)
        chain = [quantities[i] for i in sorted(ancestors(quantities, target)) if quantities[i].reads]
        digest = hashlib.sha256(str([([values[j] for j in q.reads], q.op, q.number) for q in chain]).encode()).digest()
        if 2 <= len(chain) <= 4 and (split == "test") == (digest[0] % 8 == 0):
            return tuple(quantities), target


def _idle(quantities: Sequence[Quantity], target: int) -> list[int]:
    """Computed quantities that the answer does not need."""
    return [i for i in range(len(quantities)) if quantities[i].reads and i not in ancestors(quantities, target)]


def _judged(rng: random.Random, split: str, kind: str) -> PlantedProblem | None:
    quantities, target = _draw(rng, split)
    idle = [i for i in _idle(quantities, target) if target not in ancestors(quantities, i)]
    written, origin, gold = quantities, None, values_of(quantities)[target]
    if kind == "wrong":  # another number in the place of a step's own
        origin = rng.choice([i for i in ancestors(quantities, target) if quantities[i].reads])
        changed = quantities[origin]._replace(number=rng.randint(2, 4 if quantities[origin].op == "*" else 9))
        written = (*quantities[:origin], changed, *quantities[origin + 1 :])
        if len(changed.reads) == 2 or changed.op == "/" or not _valid(written) or values_of(written)[target] == gold:
            return None
    if not idle:
        return None
    shown = rng.sample(idle, rng.randint(1, min(2, len(idle))))
    lines = _lines(rng, written, target, shown, header=rng.random() < 0.5, repeat=kind == "repeat")
    read_by_answer = {target}
    if kind == "implicit":
        lines = [line for line in lines if line[1] != target]
        read_by_answer = set(quantities[target].reads)
    units, wanted = list[Unit](), set(read_by_answer)
    for role, i, _ in reversed(lines):
        if i is not None and i in wanted and role != "repeat":  # which reads its earlier statement only
            wanted |= set(quantities[i].reads)
        units.insert(0, Unit(role, i, i in read_by_answer, i in wanted, role == "step" and i == origin))
    text = "".join(text for _, _, text in lines)
    answer, question = values_of(written)[target], _question(quantities, target)
    return PlantedProblem(question, f"{text}#### {answer}", answer, gold, kind, quantities, tuple(units))


def _lines(
    rng: random.Random, quantities: Sequence[Quantity], target: int, idle: Sequence[int], *, header: bool, repeat: bool
) -> list[_Line]:
    """The lines of a solution: steps in an order that can be followed, with idle ones and repeats among them."""
    needed, values = ancestors(quantities, target), values_of(quantities)
    written = sorted(i for i in needed.union(*(ancestors(quantities, i) for i in idle)) if quantities[i].reads)
    lines: list[_Line] = [("step" if i in needed else "idle step", i, _step(quantities, i)) for i in written]

    def insert(lowest: int, role: str, i: int | None, text: str) -> None:
        place = rng.randint(lowest, len(lines))
        inserted = [place + 1] if i is None else [quantities[i].owner, values[i]]
        lines.insert(place, (role, i, text.format(*inserted) + "\n"))

    if repeat:
        at = rng.choice([k for k, (role, _, _) in enumerate(lines) if role == "step"])
        insert(at + 1, "repeat", lines[at][1], _REPEAT)
    facts = [i for i, quantity in enumerate(quantities) if not quantity.reads and i not in needed]
    if facts and rng.random() < 0.4:
        insert(0, "idle fact", rng.choice(facts), _FACT)
    if header:
        insert(0, "header", None, rng.choice(_HEADERS))
    return lines


def _step(quantities: Sequence[Quantity], i: int) -> str:
    """The relation as the question has it, what it reads, the numbers, and the result as a given number is stated."""
    (owner, op, reads, number), values = quantities[i], values_of(quantities)
    read = " ".join(f"{quantities[j].owner}={values[j]}," for j in reads)
    left, right = [*(values[j] for j in reads), number][:2]
    chain = f"={left * (right - 1)}+{left}" if op == "*" else ""
    line = f"{_relation(quantities, i)} {read} {left}{op}{right}{chain}={values[i]}. So {owner}={values[i]}.\n"
    return _PADDING[LENGTH - len(WORDS.findall(line))] + line


def _relation(quantities: Sequence[Quantity], i: int) -> str:
    owner, op, reads, number = quantities[i]
    form, others = " totals {1} and {2}" if len(reads) == 2 else _RELATIONS[op], [quantities[j].owner for j in reads]
    return f"{owner}{form.format(number, *others)}."


def _question(quantities: Sequence[Quantity], target: int) -> str:
    facts = " ".join(_relation(quantities, i) for i in range(len(quantities)))
    return f"Say {facts} How many coins has {quantities[target].owner}?"
