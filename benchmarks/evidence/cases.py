"""Turn planted problems into token ids: the completions that every method judges. Methods see tokens only."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from benchmarks.evidence.problems import PlantedProblem
from cfa_kernels import Span, find_answer
from cfa_kernels.text.offsets import token_offsets
from trainer.data import encode_prompt

MARKER = "#### "


@dataclass(frozen=True)
class PlantedCase:
    """One completion and its parts, in tokens.

    Attributes:
        prompt: (P,) int64.
        completion: (T,) int64, with the end-of-text token.
        units: K spans to be judged, disjoint, in order.
        answer: the number after the marker.
        reasoning_end: first token of the answer's marker.
    """

    prompt: Tensor
    completion: Tensor
    units: list[Span]
    answer: Span
    reasoning_end: int

    @property
    def boundaries(self) -> list[int]:
        """K + 1 tokens: where each unit begins, and where the reasoning ends."""
        return [*(unit.start for unit in self.units), self.reasoning_end]

    @property
    def closing(self) -> Tensor:
        """The marker and the answer, as they stand in the completion."""
        return self.completion[self.reasoning_end : self.answer.end]


def planted_case(problem: PlantedProblem, tokenizer: PreTrainedTokenizerBase) -> PlantedCase:
    """A planted problem's solution in tokens.

    Raises:
        ValueError: two lines share a token, or the answer cannot be found; names the problem.
    """
    ids = tokenizer(problem.solution, add_special_tokens=False)["input_ids"]
    offsets, answer = token_offsets(ids, tokenizer), find_answer(ids, tokenizer)
    units = [Span(*tokens) for tokens in offsets.tokens([(unit.start, unit.end) for unit in problem.units])]
    for k, (before, after) in enumerate(itertools.pairwise(units)):
        if before.end > after.start:
            raise ValueError(f"{problem.question!r}: lines {k} and {k + 1} of its solution share a token")
    marker = offsets.text.rfind(MARKER)
    if answer is None or marker < 0:
        raise ValueError(f"{problem.question!r}: no answer after {MARKER!r} in {offsets.text!r}")
    (end, _), *_ = offsets.tokens([(marker, len(offsets.text))])
    completion = torch.tensor([*ids, tokenizer.eos_token_id])
    return PlantedCase(torch.tensor(encode_prompt(problem.question, tokenizer)), completion, units, answer, end)
