"""`python -m benchmarks cost draws`: measure how many draws of noise gradient saliency needs.

The order of tokens from some draws against that from many others, by Spearman's rank correlation per completion of the
trainer's embedded model, on its own solutions of generated problems, in float32 and with the same weights in bfloat16.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.harness.provenance import made_by
from benchmarks.harness.tables import table
from cfa_kernels import ScoredBatch, Span, find_answer
from cfa_kernels.estimators.gradient import Gradient
from cfa_kernels.scoring.access import InProcess
from trainer.analyze.statistics import spearman
from trainer.config import EMBEDDED, model_path
from trainer.data import encode_prompt, load_rows
from trainer.rollouts import generate

OUTCOMES = ("mean", "last", "mean_logprob")
REFERENCE_DRAWS, DRAWS = 64, (1, 4, 16)


def draws(problems: int, sigma: float) -> dict[str, Any]:
    """Measure how far the order of tokens from some draws is that from many others, and from gradient times input.

    Args:
        problems: held-out problems, one completion each.
        sigma: standard deviation of the noise.

    Returns:
        `settings`, and `outcomes`, a row for each.
    """
    model = AutoModelForCausalLM.from_pretrained(model_path(EMBEDDED)).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_path(EMBEDDED))
    questions = [row["question"] for row in load_rows("generated", split="test", count=problems)]
    encoded = [encode_prompt(question, tokenizer) for question in questions]
    rollouts = generate(model, tokenizer, encoded, max_completion_length=80, keys=[[0, i] for i in range(problems)])
    prompts, completions, answers = list[Tensor](), list[Tensor](), list[Span]()
    for prompt, ids, mask in zip(encoded, rollouts.completion_ids, rollouts.completion_mask, strict=True):
        completion = ids[mask.bool()]
        answer = find_answer(completion, tokenizer)
        if answer is not None and answer.start > 10:
            prompts.append(torch.tensor(prompt))
            completions.append(completion)
            answers.append(answer)
    units = [[Span(t, t + 1) for t in range(answer.start - 1)] for answer in answers]

    def importances(outcome: str, samples: int, seed: int, sigma: float = sigma) -> list[Tensor]:
        batch = replace(
            ScoredBatch.of(model, prompts, completions, units, answers), generator=torch.Generator().manual_seed(seed)
        )
        found = Gradient(outcome, sigma, samples)(InProcess(model), batch)
        return batch.to_callers_order(found.values)

    def agreement(found: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
        return round(statistics.mean(map(spearman, found, truth)), 3)

    found = list[dict[str, Any]]()
    truths = {outcome: importances(outcome, REFERENCE_DRAWS, 0) for outcome in OUTCOMES}
    for outcome in OUTCOMES:
        truth = truths[outcome]
        row: dict[str, Any] = {"outcome": outcome, "completions": len(prompts)}
        for samples in DRAWS:
            row[f"{samples} draws"] = agreement(importances(outcome, samples, samples), truth)
        row["sigma 0"] = agreement(importances(outcome, 1, 0, 0.0), truth)
        found.append(row)
    model.bfloat16()
    for row in found:
        outcome = str(row["outcome"])
        for samples in DRAWS:
            row[f"bfloat16, {samples} draws"] = agreement(importances(outcome, samples, samples), truths[outcome])
    return {"settings": {"problems": problems, "sigma": sigma, "reference_draws": REFERENCE_DRAWS}, "outcomes": found}


def draws_markdown(document: Mapping[str, Any]) -> str:
    """The table of `draws`."""
    settings, rows = document["settings"], document["outcomes"]
    return "\n".join([
        "# Draws of noise\n",
        f"{made_by(document)}. Mean Spearman, within a completion of the embedded model, of the tokens' gradient "
        f"saliency from so many draws of noise (sigma {settings['sigma']:g}) with that from "
        f"{settings['reference_draws']} others; sigma 0 is the plain gradient times input of the answer's log-prob.\n",
        table(list(rows[0]), [[f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row.values()]
                              for row in rows]),
    ])  # fmt: skip
