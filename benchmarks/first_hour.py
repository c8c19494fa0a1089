"""Print predictions for the first hour on a GPU beside what its result file holds.

`python -m benchmarks.first_hour STEP [RESULTS]`: the predictions of a step of `first_hour.sh`; with a result file also
the measurements. Predictions are for an H200, made before any run on one: from compiled code and a timing model (25 %
either way), from counted bytes and operations at 0.72 PFLOP/s and 4.3 TB/s, or they are what README promises.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.parts import read_results

Document = dict[str, Any]


@dataclass(frozen=True)
class Expectation:
    """One figure: what it is, what was predicted, and where a result file has it (None: it has not)."""

    what: str
    predicted: str
    find: Callable[[Document], str | None]


def _entries(document: Document, part: str, kind: str, **wanted: str) -> list[dict[str, Any]]:
    """Entries of a list of a part whose fields are as `wanted`."""
    listed = document["parts"].get(part, {}).get(kind, [])
    return [entry for entry in listed if all(entry.get(key) == value for key, value in wanted.items())]


def _first(part: str, kind: str, text: Callable[[dict[str, Any]], str], **wanted: str) -> Callable[..., str | None]:
    def find(document: Document) -> str | None:
        found = _entries(document, part, kind, **wanted)
        return text(found[0]) if found else None

    return find


def _rate(part: str, group: str, name: str = "ours") -> Callable[[Document], str | None]:
    return _first(part, "figures", lambda entry: f"{entry['tflop_per_s']:.0f} TFLOP/s", group=group, name=name)


def _seconds(part: str, group: str, name: str) -> Callable[[Document], str | None]:
    return _first(part, "figures", lambda e: f"{e['seconds']['median'] * 1e3:.3g} ms", group=group, name=name)


def _ratio(part: str, group: str, of: str, to: str) -> Callable[[Document], str | None]:
    return _first(part, "ratios", lambda entry: f"{entry['ratio']:.3g}", group=group, of=of, to=to)


def _tests(document: Document) -> str | None:
    part = document["parts"].get("tests")
    if part is None:
        return None
    counts = part["tests"]
    return f"{counts['failures'] + counts['errors']} of {counts['tests']} red in all so far ({part['outcome']})"


def _first_light(document: Document) -> str | None:
    checks = _entries(document, "first-light", "checks")
    wrong = [check["group"] for check in checks if "wrong" in check]
    return f"{len(wrong)} of {len(checks)} wrong{': ' * bool(wrong)}{'; '.join(wrong)}" if checks else None


def _spills(document: Document) -> str | None:
    builds = _entries(document, "first-light", "builds")
    spilled = [f"{build['name']} {build['spilled_words']}" for build in builds if build["spilled_words"]]
    return f"{len(spilled)} of {len(builds)} builds{': ' * bool(spilled)}{'; '.join(spilled)}" if builds else None


def _registers(kernel: str) -> Callable[[Document], str | None]:
    def find(document: Document) -> str | None:
        found = [build["registers"] for build in _entries(document, "first-light", "builds", name=kernel)]
        return f"{min(found)} to {max(found)} in {len(found)} builds" if found else None

    return find


def _per_thousand_rows(group: str, name: str, seconds: str, rows: str) -> Callable[[Document], str | None]:
    def text(entry: dict[str, Any]) -> str:
        per_row = entry[seconds] / max(entry[rows], 1)
        return f"{per_row * 1e6:.3g} ms ({entry[rows]:.0f} rows in {entry[seconds] * 1e3:.0f} ms)"

    return _first("step", "figures", text, group=group, name=name)


def _share(group: str, kind: str) -> Callable[[Document], str | None]:
    def text(entry: dict[str, Any]) -> str:
        lines = [line for line in entry["classes"] if line["name"] == kind]
        return f"{lines[0]['share']:.0%} of {entry['busy_seconds'] * 1e3:.0f} ms" if lines else "none"

    return _first("profile", "profiles", text, group=group)


def _fastest_peer(group: str) -> Callable[[Document], str | None]:
    """The smallest ratio to ours of the contenders that are not ours."""

    def find(document: Document) -> str | None:
        peers = [
            e for e in _entries(document, "loss", "ratios", group=group) if not e["of"].startswith(("ours", "bare"))
        ]
        best = min(peers, key=lambda entry: entry["ratio"], default=None)
        return None if best is None else f"{best['ratio']:.2f} ({best['of']})"

    return find


MIXED, LONG = "Qwen3-1.7B LoRA, all mixed", "Qwen3-1.7B LoRA, G = 8, P = T = 512"
EXACT = "ours counterfactual, one pass"
HEAD = "Qwen3-1.7B and Qwen2.5-3B 8k tokens, head"
_FORWARD = (
    ("Qwen3-1.7B gsm8k", "223 TFLOP/s (Triton 3.6: 215); promised 200"),
    ("Llama-3.2-3B gsm8k", "253 TFLOP/s (Triton 3.6: 260); promised 200"),
    ("Qwen2.5-3B gsm8k", "322 TFLOP/s (Triton 3.6: 306); promised 230"),
    ("Qwen3-1.7B long", "438 TFLOP/s (Triton 3.6: 380)"),
)
_BACKWARD = (
    ("Qwen3-1.7B gsm8k", (395, 188), (0.3, 0.65)),
    ("Qwen3-1.7B 8 x 8, P 110, T 220", (529, 359), (0.75, 1.1)),
    ("Qwen3-1.7B 4 x 8, P 512, T 512", (946, 800), (1.05, 1.25)),
)

STEPS: dict[int, tuple[Expectation, ...]] = {
    1: (
        Expectation("results that float64 refuses", "0", _first_light),
        Expectation("builds that spill", "0", _spills),
        Expectation("registers, attention", "128 at most at D 128", _registers("tree_attention_kernel")),
        Expectation("registers, key gradients", "135 to 226 at D 64", _registers("key_gradient_kernel")),
    ),
    2: (Expectation("tests of the kernels", "0 red, 5 minutes", _tests),),
    3: (Expectation("tests of scoring and training", "0 red, 3 minutes", _tests),),
    4: (
        *(
            Expectation(f"attention, {name}", predicted, _rate("kernels", f"attention {name}"))
            for name, predicted in _FORWARD
        ),
        *(
            line
            for name, microseconds, share in _BACKWARD
            for line in (
                Expectation(
                    f"gradients of attention, {name}",
                    f"{microseconds[0]} us in sums of 8,192 query rows, {microseconds[1]} us of 2,048",
                    _seconds("kernels", f"attention backward {name}", "ours"),
                ),
                Expectation(
                    "flash attention's time over that, per operation",
                    f"{share[0]} and {share[1]}; goal 0.5",
                    _ratio("kernels", f"attention backward {name}", "flash attention, equal lengths", "ours"),
                ),
            )
        ),
        *(
            Expectation(
                f"log-probs, {rows} rows: share of what bandwidth and products allow",
                "promised 0.85",
                _ratio("kernels", f"log-probs Qwen3-1.7B and Qwen2.5-3B, {rows} rows", "bound", "ours"),
            )
            for rows in (16, 512, 6000)
        ),
    ),
    5: (
        Expectation(
            "update, ms per 1,000 tree rows",
            "31 (455 ms for 14,895 rows); 12 with adapters fused",
            _per_thousand_rows(f"step, {MIXED}", EXACT, "update_seconds", "rows_with_gradient"),
        ),
        Expectation(
            "credit, ms per 1,000 branch rows",
            "12 (544 ms for 45,762 rows); 6 with adapters fused",
            _per_thousand_rows(f"step, {MIXED}", EXACT, "credit_seconds", "rows_without_gradient"),
        ),
        Expectation("counterfactual step over TRL's", "promised 1.0", _ratio("step", f"step, {MIXED}", EXACT, "TRL")),
        Expectation("the step itself", "not predicted at this size", _seconds("step", f"step, {MIXED}", EXACT)),
    ),
    6: (
        Expectation(
            "device idle",
            "12 % (140 of 1,140 ms; 4 % with one walk over the modules)",
            _first("profile", "profiles", lambda e: f"{e['idle_share']:.0%}", group=f"profile, {MIXED}"),
        ),
        Expectation("matrix products", "about 30 % without adapters'", _share(f"profile, {MIXED}", "matrix products")),
        Expectation("attention", "3 %", _share(f"profile, {MIXED}", "attention")),
        Expectation(
            "copies and element-wise work",
            "half, adapters' above all; a tenth with adapters fused",
            _share(f"profile, {MIXED}", "element-wise"),
        ),
    ),
    7: (
        Expectation(
            "8k tokens, head frozen",
            "17 ms (29 ms for 14,080 rows)",
            _seconds("loss", f"loss from hidden states, {HEAD} frozen", "ours"),
        ),
        Expectation(
            "fastest peer over ours, head frozen",
            "promised 2.0",
            _fastest_peer(f"loss from hidden states, {HEAD} frozen"),
        ),
        Expectation(
            "fastest peer over ours, head trains",
            "promised 1.5",
            _fastest_peer(f"loss from hidden states, {HEAD} trains"),
        ),
        Expectation(
            "8k tokens from logits, Liger over ours",
            "promised 1.3",
            _ratio("loss", "loss from logits, 8k tokens, V 151936", "Liger logits-level", "ours"),
        ),
    ),
    8: tuple(
        Expectation(
            f"scoring, {peer} over ours",
            f"promised {promised}",
            _ratio("scoring", "scoring Qwen3-1.7B gsm8k", peer, "ours"),
        )
        for peer, promised in (("per span", "20"), ("best padded batch with logits_to_keep", "3"))
    ),
    9: (
        Expectation(
            "groups as they come: counterfactual step over TRL's",
            "promised 1.0",
            _ratio("step", "step, Qwen3-1.7B LoRA, as they come", EXACT, "TRL"),
        ),
        Expectation(
            "G = 8, P = T = 512: ours over varlen",
            "promised 0.625",
            _ratio("step", f"step, {LONG}", "ours", "varlen without sharing"),
        ),
        Expectation("the same over TRL", "promised 0.4", _ratio("step", f"step, {LONG}", "ours", "TRL")),
    ),
}


def table(step: int, document: Document | None) -> str:
    """The step's predictions, and beside them what a result file holds."""
    heads = ["", "predicted"] + ([] if document is None else ["found"])
    rows = [heads]
    for line in STEPS[step]:
        row = [line.what, line.predicted]
        rows.append(row if document is None else [*row, line.find(document) or "nothing yet"])
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def main(argv: list[str]) -> int:
    """Print one step's table."""
    step, path = int(argv[0]), Path(argv[1]) if len(argv) > 1 else None
    document = None if path is None else read_results(path)
    print(f"-- step {step}: what was predicted" + (f", and what {path} says" if path is not None else ""))
    print(table(step, document))
    if document is not None:
        print("parts: " + (", ".join(f"{k} {v}" for k, v in document.get("state", {}).items()) or "none yet"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
