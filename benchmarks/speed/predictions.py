"""What `speed ab` is predicted to measure on an H200, and the rules by which its figures decide what is built next.

`python -m benchmarks.speed.predictions FILE.json ...` prints both of result files together, as `decide.sh` ends with.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

VARIANTS = (", HF's layers", ", Liger", ", compiled")

SECONDS, ADDS = "seconds.median", "adds"
MASKED, MERGED, NEAREST = (f"ours counterfactual, one pass{end}" for end in ("", ", merged", ", 3 nearest spans"))
TRL = "TRL, all rows at a time, use_liger_kernel"
SIX, LONG = "six spans, {} tokens sampled", "long answers, 64 tokens sampled"
KINDS = "off", "cf", "cf, merged", "cf, 3 nearest spans", "prefix_gain_positive"


class Predicted(NamedTuple):
    """A figure of a block, predicted to be between two values; `fact` is its path in the figure.

    `cpp` is whether graphs are launched from C++, without which a figure is another.
    """

    block: str
    group: str
    name: str
    fact: str
    least: float
    most: float
    cpp: bool = False


def _each(block: str, group: str, fact: str, **values: Any) -> Iterator[Predicted]:
    cpp = values.pop("cpp", False)
    for name, value in values["of"].items():
        least, most = value if isinstance(value, tuple) else (value, value)
        yield Predicted(block, group, name, fact, least, most, cpp)


PREDICTED: tuple[Predicted, ...] = (
    *_each("trl", "4x8", SECONDS, of={"ours": 0.138, MASKED: 0.303, MERGED: 0.287, NEAREST: 0.220}),
    *_each("trl", "4x8", SECONDS, of={TRL: (0.257, 0.272)}),
    *_each("trl", "4x8", "of_trl", of={"ours": 0.53, MASKED: 1.15, MERGED: 1.10, NEAREST: 0.85}),
    *_each("profile", "4x8", "busy_seconds", of={"ours": 0.112, MASKED: 0.247, MERGED: 0.229}),
    *_each("profile", "4x8", "busy_parts.forward", of={"ours": 0.041}),
    *_each("profile", "4x8", "idle_parts.forward", of={"ours": 0.016, MASKED: 0.030}),
    *_each("trl", "4x8", SECONDS, of={"ours": 0.134, MASKED: 0.295, MERGED: 0.265}, cpp=True),
    *_each("trainer", SIX.format(64), "time/update", of={"off": 0.280}),
    *_each(
        "trainer", SIX.format(64), "time/credit",
        of=dict(zip(KINDS[1:], (0.283, 0.262, 0.115, 0.065), strict=True)),
    ),
    *_each("trainer", SIX.format(64), "time/generate", of={"off": 0.53}),
    *_each("trainer", SIX.format(400), "time/generate", of={"off": 1.9}),
    *_each("trainer", SIX.format(400), ADDS, of=dict(zip(KINDS[1:], (0.13, 0.12, 0.05, 0.03), strict=True))),
    *_each("trainer", "sampling", "per_token", of={"fixed and a token": 0.004}),
    *_each("trainer", "sampling", "fixed", of={"fixed and a token": 0.28}),
    *_each("long", "long", SECONDS, of={"TRL, 16 rows at a time, use_liger_kernel": 3.15}),
    *_each("long", "long", "of_trl", of={"ours": 0.21}),
    *_each(
        "answers", LONG, "adds_unsampled",
        of={"cf": (1.7, 2.0), "cf, 3 nearest spans": 0.2, "prefix_gain_positive": 0.05},
    ),
)  # fmt: skip


class Rule(NamedTuple):
    """A figure and the most that it may be; what follows if it is more, and if not."""

    what: Predicted
    above: str
    below: str


def _of(block: str, name: str, fact: str, most: float, *, group: str = "4x8", cpp: bool = False) -> Predicted:
    return Predicted(block, group, name, fact, 0.0, most, cpp)


RULES = (
    Rule(
        _of("trl", NEAREST, SECONDS, 0.24), "branches wait for the host: shorten the host's path before anything else",
        "the host's path can wait",
    ),
    Rule(
        _of("trl", MERGED, SECONDS, 0.255, cpp=True), "delete merge_adapters for scoring",
        "keep merge_adapters, and build no CUDA graphs",
    ),
    Rule(
        _of("trainer", "fixed and a token", "fixed", 0.2, group="sampling"),
        "profile TransformersEngine.__call__ before any kernel", "write the decoder's kernels",
    ),
    Rule(
        _of("trl", "ours", SECONDS, 0.145), "fewer kernels bought nothing on the device: look at cuBLAS's choices",
        "fewer kernels bought what they were to",
    ),
)  # fmt: skip


def plain_name(name: str) -> str:
    """A contender's name without the layers that it ran with."""
    for variant in VARIANTS:
        name = name.replace(variant, "")
    return name


def figures_of(part: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The figures of a block of `speed ab`."""
    result = part.get("result", part)
    figures: list[dict[str, Any]] = result if isinstance(result, list) else result.get("figures", [])
    return figures


def measured(document: Mapping[str, Any], what: Predicted) -> float | None:
    """What a document has for a prediction; of several variants the last."""
    if document.get("cpp_wrapper", False) != what.cpp:
        return None
    found = None
    for figure in figures_of(document["parts"].get(what.block, {})):
        if (figure["group"], plain_name(figure["name"])) == (what.group, what.name):
            value: Any = figure
            for key in what.fact.split("."):
                value = value.get(key) if isinstance(value, dict) else None
            found = value if value is not None else found
    return found


def beside(documents: Sequence[Mapping[str, Any]], block: str | None = None) -> str:
    """Predictions beside what was measured, a line each; of one block or of all."""
    lines = []
    for one in PREDICTED:
        values = [value for document in documents if (value := measured(document, one)) is not None]
        if block is None or (one.block == block and values):
            expected = f"{one.least:g}" if one.least == one.most else f"{one.least:g} to {one.most:g}"
            came = f"{values[-1]:.4g}" if values else "not measured"
            where = f"{one.block}{' from C++' * one.cpp}: {one.group}, {one.name}, {one.fact}"
            lines.append(f"{where}: predicted {expected}, came {came}\n")
    return "".join(lines)


def decisions(documents: Sequence[Mapping[str, Any]]) -> str:
    """Each rule, decided or undecided, a line each."""
    lines = []
    for what, above, below in RULES:
        values = [value for document in documents if (value := measured(document, what)) is not None]
        where = f"{what.name}{' from C++' * what.cpp}, {what.fact}, at most {what.most:g}"
        if values:
            lines.append(f"decided: {where}, came {values[-1]:.4g}: {above if values[-1] > what.most else below}\n")
        else:
            lines.append(f"undecided: {where}: not measured\n")
    return "".join(lines)


def page(document: Mapping[str, Any], block: str) -> str:
    """The figures of a block with their facts, what failed, and predictions beside what came."""
    part, lines = document["parts"][block], list[str]()
    for figure in figures_of(part):
        facts = {name: value for name, value in figure.items() if isinstance(value, int | float)}
        for outer in ("seconds", "parts", "busy_parts", "idle_parts"):
            inner = figure.get(outer) or {}
            facts |= {f"{outer}.{name}": value for name, value in inner.items() if isinstance(value, int | float)}
        words = ", ".join(f"{name} {value:.4g}" for name, value in facts.items())
        lines.append(f"{figure['group']}: {figure['name']}: {words}\n")
        if "failed" in figure:
            lines.append(f"{figure['group']}: {figure['name']} failed: {figure['failed']}\n")
    lines += [f"{block} {kind}: {part[kind]}\n" for kind in ("failed", "skipped") if kind in part]
    return "".join(lines) + beside([document], block)


def main(files: Sequence[str]) -> int:
    """Print predictions, what came, and decisions of result files together; later files count where both have one."""
    documents = [json.loads(Path(file).read_text("utf-8")) for file in files if Path(file).exists()]
    names = {document["environment"]["device"]["name"] for document in documents}
    print(f"predicted for an NVIDIA H200, measured on {', '.join(sorted(names)) or 'nothing'}")
    print(beside(documents))
    print(decisions(documents), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
