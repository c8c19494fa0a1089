"""`python -m benchmarks.saliency`: what gradient saliency costs, and how many draws of noise it takes.

Cost is that of 16 completions in operations and in seconds of one process, in turns with a plain forward and backward
of the same batch, padded by group. Draws are compared with many others: Spearman's rank
correlation per completion of the trainer's embedded model, on its own solutions of generated problems, in float32 and
with the same weights in bfloat16.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.workloads import Job, gsm8k_job, policy
from cfa_kernels import Span, find_answer
from cfa_kernels.gradient_saliency import gradient_saliency
from cfa_kernels.hf import causal_lm
from cfa_kernels.proof import prove_trainable
from trainer.config import EMBEDDED, model_path
from trainer.data import encode_prompt, load_rows
from trainer.rollouts import generate

OUTCOMES = ("mean", "last", "mean_logprob")
REFERENCE_DRAWS, DRAWS = 64, (1, 4, 16)


def plain_forward_and_backward(model: nn.Module, job: Job) -> None:
    """Sum of all completion log-probs and its gradient, one padded forward for the completions of each prompt."""
    for _, group in itertools.groupby(range(len(job.prompts)), key=lambda b: job.prompts[b].tolist()):
        rows = list(group)
        prompt, completions = job.prompts[rows[0]], [job.completions[b] for b in rows]
        targets = nn.utils.rnn.pad_sequence(completions, batch_first=True)
        ids = torch.cat([prompt.expand(len(rows), -1), targets], dim=1)
        logits = causal_lm(model)(ids, use_cache=False, logits_to_keep=targets.shape[1] + 1).logits[:, :-1].float()
        logits.log_softmax(-1).gather(-1, targets[..., None]).sum().backward()


def cost(model_name: str, problems: int, turns: int) -> list[dict[str, object]]:
    """Ratios to the plain forward and backward, of operations and of processor seconds."""
    job, found = gsm8k_job(problems), list[dict[str, object]]()
    units = [[Span(t, t + 1) for t in range(answer.start - 1)] for answer in job.answers]

    def saliency(model: nn.Module, outcome: str, samples: int) -> Callable[[], object]:
        return lambda: gradient_saliency(
            model, job.prompts, job.completions, units, job.answers, outcome=outcome, samples=samples
        )

    for lora in (True, False):
        model = policy(model_name, lora=lora, device=torch.device("cpu"), dtype=torch.float32)
        prove_trainable(causal_lm(model))
        runs: dict[str, Callable[[], object]] = {
            "plain": lambda model=model: plain_forward_and_backward(model, job),
            "mean, 1 draw": saliency(model, "mean", 1),
            "mean, 4 draws": saliency(model, "mean", 4),
            "mean_logprob, 1 draw": saliency(model, "mean_logprob", 1),
        }
        operations, seconds = dict[str, int](), {name: list[float]() for name in runs}
        for name, run in runs.items():
            with FlopCounterMode(display=False) as counter:
                run()
            operations[name] = counter.get_total_flops()
        for _ in range(turns):
            for name, run in runs.items():
                start = time.process_time()
                run()
                seconds[name].append(time.process_time() - start)
        for name in runs:
            draws = 4 if "4 draws" in name else 1
            taken = [a / b for a, b in zip(seconds[name], seconds["plain"], strict=True)]
            found.append(
                {
                    "training": "LoRA" if lora else "full",
                    "run": name,
                    "operations / plain": round(operations[name] / operations["plain"], 3),
                    "per draw": round(operations[name] / draws / operations["plain"], 3),
                    "CPU seconds / plain": round(statistics.median(taken), 3) if taken else "-",
                }
            )
    return found


def spearman(one: Tensor, other: Tensor) -> float:
    """Rank correlation of two (n,) tensors without ties."""
    ranks = torch.stack([one.argsort().argsort(), other.argsort().argsort()]).double()
    return float(torch.corrcoef(ranks)[0, 1])


def draws(problems: int, sigma: float) -> list[dict[str, object]]:
    """How far the order of tokens from some draws is that from many others, and from gradient times input."""
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
        return gradient_saliency(
            model, prompts, completions, units, answers, outcome=outcome, sigma=sigma, samples=samples,
            generator=torch.Generator().manual_seed(seed),
        )[0]  # fmt: skip

    def agreement(found: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
        return round(statistics.mean(map(spearman, found, truth)), 3)

    table = list[dict[str, object]]()
    truths = {outcome: importances(outcome, REFERENCE_DRAWS, 0) for outcome in OUTCOMES}
    for outcome in OUTCOMES:
        truth = truths[outcome]
        row: dict[str, object] = {"outcome": outcome, "completions": len(prompts)}
        for samples in DRAWS:
            row[f"{samples} draws"] = agreement(importances(outcome, samples, samples), truth)
        row["sigma 0"] = agreement(importances(outcome, 1, 0, 0.0), truth)
        table.append(row)
    model.bfloat16()
    for row in table:
        outcome = str(row["outcome"])
        for samples in DRAWS:
            row[f"bfloat16, {samples} draws"] = agreement(importances(outcome, samples, samples), truths[outcome])
    return table


def main() -> None:
    """Print both tables and, if asked, write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-40m", help="shape of the model whose cost is measured")
    parser.add_argument("--problems", type=int, default=4, help="problems, of four completions each, for the cost")
    parser.add_argument("--turns", type=int, default=3, help="how often each run is timed, 0 for counts alone")
    parser.add_argument("--completions", type=int, default=64, help="completions of the embedded model for the draws")
    parser.add_argument("--sigma", type=float, default=1e-3, help="standard deviation of the noise")
    parser.add_argument("--into", help="JSON file to write")
    parser.add_argument("--only", choices=("cost", "draws"))
    options = parser.parse_args()
    tables: dict[str, list[dict[str, object]]] = {}
    if options.only != "cost":
        tables["draws"] = draws(options.completions, options.sigma)
    if options.only != "draws":
        tables["cost"] = cost(options.model, options.problems, options.turns)
    for rows in tables.values():
        print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
        for row in rows:
            print("| " + " | ".join(map(str, row.values())) + " |")
        print()
    if options.into:
        with open(options.into, "w", encoding="utf-8") as file:
            json.dump(tables, file, indent=1)


if __name__ == "__main__":
    main()
