"""`python -m benchmarks evidence placeholders`: measure how far the ranking of spans depends on the mask.

The embedded model's own solutions of generated problems, their spans masked by one token or another.
"""

import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.evidence.agreement import rank_correlation
from benchmarks.harness.provenance import made_by
from benchmarks.harness.tables import table
from cfa_kernels import Span, detect_spans, find_answer, score_counterfactuals
from trainer.analyze.statistics import bootstrap_interval
from trainer.config import EMBEDDED, model_path
from trainer.data import encode_prompt, load_rows
from trainer.rollouts import generate

PLACEHOLDERS = (" ", ".", "=", "0", "\n")
"""Tokens beside pad and end-of-text, where the model has them as one token."""


NOISE = 1e-3
"""A drop nearer to 0, in nats, is rounding, and counts as 0: the order of such spans says nothing of a placeholder."""


@dataclass(frozen=True)
class Settings:
    """Size of the measurement."""

    problems: int = 128
    """Held-out problems, one completion each."""
    draws: int = 1000
    """Bootstrap draws."""


def run(settings: Settings) -> dict[str, Any]:
    """Spearman, within a completion, of drops under each placeholder with those under the pad token."""
    model = AutoModelForCausalLM.from_pretrained(model_path(EMBEDDED)).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_path(EMBEDDED))
    rows = load_rows("generated", split="test", count=settings.problems)
    encoded = [encode_prompt(row["question"], tokenizer) for row in rows]
    keys = [[0, i] for i in range(settings.problems)]
    completions = generate(model, tokenizer, encoded, max_completion_length=80, keys=keys).ids()
    prompts, kept, spans, answers = list[Tensor](), list[Tensor](), list[list[Span]](), list[Span]()
    for prompt, ids in zip(encoded, completions, strict=True):
        completion = torch.as_tensor(ids)
        answer = find_answer(completion, tokenizer)
        found = detect_spans(completion, tokenizer, answer=answer) if answer is not None else []
        if answer is not None and len(found) > 1:
            prompts.append(torch.tensor(prompt))
            kept.append(completion)
            spans.append(found)
            answers.append(answer)

    def drops(placeholder: int) -> list[Tensor]:
        found = score_counterfactuals(model, prompts, kept, spans, answers, placeholder_id=placeholder).drop
        return [torch.where(row.abs() < NOISE, 0.0, row) for row in found]

    usual, found_by = drops(tokenizer.pad_token_id), dict[str, Any]()
    tokens = {"end-of-text": [tokenizer.eos_token_id]}
    tokens |= {repr(text): tokenizer.encode(text, add_special_tokens=False) for text in PLACEHOLDERS}
    for name, ids in tokens.items():
        if len(ids) == 1:
            pairs = zip(drops(ids[0]), usual, strict=True)
            ranks = [rank_correlation(a.tolist(), b.tolist()) for a, b in pairs if len(set(b.tolist())) > 1]
            found_by[name] = bootstrap_interval(statistics.fmean, ranks, draws=settings.draws)._asdict()
    return {"settings": asdict(settings), "completions": len(kept), "spans": sum(map(len, spans)), "by": found_by}


def markdown(document: dict[str, Any]) -> str:
    """The table of the command."""
    rows = [[name, f"{f['value']:.2f} ({f['low']:.2f} to {f['high']:.2f})"] for name, f in document["by"].items()]
    return "\n".join([
        "# Placeholders\n",
        f"{made_by(document)}. The embedded model, {document['completions']} of its own completions with "
        f"{document['spans']} spans. Mean Spearman, within a completion, of the drops under a placeholder with those "
        f"under the pad token, drops within {NOISE} nats of 0 counted as 0; in parentheses 95 % bootstrap intervals "
        "over completions.\n",
        table(["placeholder", "Spearman with the pad token's drops"], rows),
    ])  # fmt: skip
