"""A walk through Hopper machine code that looks for matrix products whose input is overwritten too early.

A warp-group product (HGMMA) may read its left operand from registers until the wait that retires it (WARPGROUP.DEPBAR).
ptxas before 13.3 can overwrite them earlier without a warning (triton-lang/triton#9433).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

INPUT_REGISTERS = 4  # of the left operand, whatever its dtype: 64 rows of 32 bytes over 128 threads
_READS_FIRST = ("BAR", "BRX", "CALL", "JMP", "JMX", "NANOSLEEP", "RET", "WARPSYNC")  # the first operand
_SETS_PREDICATE = ("DSETP", "FCHK", "FSETP", "HSETP2", "ISETP")
_MANY_GROUPS = 8  # no wait leaves so many unfinished


@dataclass(frozen=True)
class Instruction:
    """One line of `nvdisasm -c`."""

    text: str
    predicate: str
    opcode: str
    operands: tuple[str, ...]

    @property
    def root(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def is_product(self) -> bool:
        return self.root in ("HGMMA", "IGMMA", "QGMMA")

    @property
    def ends_group(self) -> bool:
        """Whether it is the last product of a group; a wait counts groups."""
        return self.is_product and "gsb0" in self.operands

    @property
    def register_input(self) -> range | None:
        """Registers of a product's left operand; None if that is in shared memory."""
        first = re.fullmatch(r"R(\d+)", self.operands[1]) if self.is_product else None
        return range(int(first[1]), int(first[1]) + INPUT_REGISTERS) if first else None

    @property
    def unfinished_after_wait(self) -> int | None:
        """How many of the youngest groups a wait for products leaves unfinished; None for other instructions."""
        is_wait = self.opcode.startswith("WARPGROUP.DEPBAR") and not self.predicate
        return int(self.operands[1], 16) if is_wait else None

    @property
    def written(self) -> range:
        """General registers this may write."""
        if self.root in (*_READS_FIRST, *_SETS_PREDICATE):
            return range(0)
        results = [operand for operand in self.operands if not re.fullmatch(r"!?U?P[T\d]", operand)]
        first = re.fullmatch(r"R(\d+)(\.reuse|\.64)?", results[0]) if results else None
        return range(int(first[1]), int(first[1]) + self._result_registers()) if first else range(0)

    def _result_registers(self) -> int:
        kinds = self.opcode.split(".")[1:]
        if self.is_product:
            columns = int(kinds[0].split("x")[1])
            return columns // (4 if kinds[1] == "F16" else 2)
        if self.root == "LDSM":
            return int(kinds[-1]) if kinds[-1].isdigit() else 1
        if "128" in kinds or self.root in ("HMMA", "IMMA", "DMMA"):
            return 4
        doubled = self.root in ("DADD", "DFMA", "DMUL") or (self.root == "CS2R" and "32" not in kinds)
        converted = self.root in ("F2F", "F2I", "I2F") and "64" in self.opcode
        return 2 if doubled or converted or "64" in kinds or "WIDE" in kinds else 1


def parse(sass: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of a listing by `nvdisasm -c`, and the index of the one behind each label."""
    instructions: list[Instruction] = []
    labels = {}
    for line in sass.splitlines():
        label = re.match(r"\s*(\.L\w+):", line)
        if label:
            labels[label[1]] = len(instructions)
        match = re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@(\S+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", line)
        if match:
            predicate, opcode, operands = match.groups(default="")
            text = f"{predicate and '@'}{predicate} {opcode} {operands}".strip()
            parts = tuple(part.strip() for part in operands.split(",") if part.strip())
            instructions.append(Instruction(text, predicate, opcode, parts))
    return instructions, labels


def _successors(instructions: list[Instruction], labels: dict[str, int], at: int) -> Iterator[int]:
    """The instructions that may follow `at`, more than really can if the listing does not say."""
    here = instructions[at]
    if here.root in ("BRA", "BRX", "CALL", "JMP", "JMX"):
        target = here.operands[-1].strip("`()")
        if target not in labels:
            raise ValueError(f"cannot follow {here.text}")
        yield labels[target]
    elif here.root == "BSYNC":
        for other in instructions:
            if other.root == "BSSY" and other.operands[0] == here.operands[0]:
                yield labels[other.operands[-1].strip("`()")]
    always_leaves = here.root in ("EXIT", "RET", "KILL") or (here.root == "BRA" and len(here.operands) == 1)
    if (here.predicate or not always_leaves) and at + 1 < len(instructions):
        yield at + 1


def overwritten_inputs(sass: str) -> list[str]:
    """Every product of a listing whose register input something may write before the product is retired.

    A wait retires it that leaves fewer groups unfinished than have been ended since, its own included. Raises
    `ValueError` for a jump that leaves the listing or is computed.
    """
    instructions, labels = parse(sass)
    findings = []
    for start, product in enumerate(instructions):
        watched = product.register_input
        if watched is None:
            continue
        pending = [(at, int(product.ends_group)) for at in _successors(instructions, labels, start)]
        seen = set(pending)
        while pending:
            at, groups = pending.pop()
            here = instructions[at]
            left = here.unfinished_after_wait
            if left is not None and groups > left:
                continue
            if max(watched.start, here.written.start) < min(watched.stop, here.written.stop):
                findings.append(f"{product.text}: input overwritten by {here.text}")
                continue
            groups = min(groups + here.ends_group, _MANY_GROUPS)
            states = {(after, groups) for after in _successors(instructions, labels, at)} - seen
            seen |= states
            pending += states
    return findings
