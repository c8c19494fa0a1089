"""Compute truths that need sampling: the value of a step to the policy, and the tokens that decide a greedy chain.

The model that methods are judged on is sampled here.
"""

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.evidence.cases import Case, sampled_case
from benchmarks.evidence.models import Subject
from trainer.data import encode_prompt
from trainer.rewards.numbers import final_number
from trainer.rollouts import generate

_ROWS = 256  # continuations decoded together


def step_values(
    subject: Subject,
    cases: Sequence[Case],
    answers: Sequence[int],
    gold: Sequence[int],
    *,
    samples: int,
    seed: int,
    room: int,
) -> list[dict[str, list[float]]]:
    """For each case, at each of its K + 1 boundaries, the shares of sampled continuations that reach an answer.

    Args:
        answers: what each completion itself answers.
        gold: what would be right.
        samples: continuations per boundary, at temperature 1.
        seed: with a case's place and the boundary, the key of every draw.
        room: most tokens of a continuation.

    Returns:
        For each case `own` and `right`, K + 1 shares each: of continuations that give the completion's own answer, and
        of those that are right.
    """
    places = [(b, k) for b, case in enumerate(cases) for k in range(len(case.boundaries)) for _ in range(samples)]
    prefixes = [[*cases[b].prompt.tolist(), *cases[b].completion[: cases[b].boundaries[k]].tolist()] for b, k in places]
    keys = [(seed, b, k, i % samples) for i, (b, k) in enumerate(places)]
    found: list[Any] = []
    for start in range(0, len(prefixes), _ROWS):
        rows = slice(start, start + _ROWS)
        texts = generate(
            subject.model, subject.tokenizer, prefixes[rows], max_completion_length=room, keys=keys[rows]
        ).texts
        found += [final_number(text) for text in texts]
    shares = [{"own": [0.0] * len(case.boundaries), "right": [0.0] * len(case.boundaries)} for case in cases]
    for (b, k), number in zip(places, found, strict=True):
        shares[b]["own"][k] += (number == answers[b]) / samples
        shares[b]["right"][k] += (number == gold[b]) / samples
    return shares


def right_chains(
    subject: Subject, questions: Sequence[str], gold: Sequence[int], *, room: int
) -> list[tuple[int, Case]]:
    """Greedy completions that are right, each token of their reasoning a unit, with their problem's place."""
    prompts = [encode_prompt(question, subject.tokenizer) for question in questions]
    rollouts = generate(subject.model, subject.tokenizer, prompts, max_completion_length=room)
    chains = []
    for i, (prompt, completion, text) in enumerate(zip(prompts, rollouts.ids(), rollouts.texts, strict=True)):
        if final_number(text) == gold[i]:
            case = sampled_case(prompt, completion, subject.tokenizer)
            if case.units:
                chains.append((i, case))
    return chains


@torch.no_grad()
def substitution_oracle(subject: Subject, case: Case, gold: int, *, room: int) -> dict[str, list[bool]]:
    """Find the tokens of a right, greedily decoded chain that decide whether it is right.

    At each reasoning token the most probable other token is put in its place, and the rest decoded greedily. As a
    control the chain is also decoded on from each token as it is: where that flips the answer too, the flip is no
    token's doing.

    Returns:
        `critical` and `control`, each a bool per reasoning token: the chain was no longer right.

    Source: "Outcome-Grounded Advantage Reshaping", its oracle of token substitution; greedily decoded chains after
    "critical tokens" (arXiv 2510.10974).
    """
    prompt, completion = case.prompt.tolist(), case.completion.tolist()
    ids = torch.cat([case.prompt, case.completion])
    logits = subject.model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].float().clone()  # (T, V)
    logits[torch.arange(len(completion)), case.completion] = -torch.inf
    others = logits.argmax(-1).tolist()
    flips = {}
    for name, tokens in (("critical", others), ("control", completion)):
        begun = [[*completion[:t], tokens[t]] for t in range(case.reasoning_end)]
        texts = [subject.tokenizer.decode(row, skip_special_tokens=True) for row in begun]
        # A substitute that ends the text leaves nothing to decode.
        going = [t for t, row in enumerate(begun) if row[-1] != subject.tokenizer.eos_token_id]
        for start in range(0, len(going), _ROWS):
            some = going[start : start + _ROWS]
            prefixes = [[*prompt, *begun[t]] for t in some]
            decoded = generate(subject.model, subject.tokenizer, prefixes, max_completion_length=room)
            for t, text in zip(some, decoded.texts, strict=True):
                texts[t] += text
        flips[name] = [final_number(text) != gold for text in texts]
    return flips
