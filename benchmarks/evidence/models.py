"""A small model that is asked: it answers problems, from their beginning or from some tokens on."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer import one_page
from trainer.rollouts import TransformersEngine


def clock(device: torch.device) -> float:
    """Seconds of the processor; of a GPU those by the wall, when it has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


class Subject:
    """A model in eval mode, its tokenizer, and how it is sampled."""

    def __init__(self, settings: one_page.Settings) -> None:
        self.settings, self.tokenizer = settings, AutoTokenizer.from_pretrained(settings.model)
        self.model: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
        self.model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        self.engine = TransformersEngine(self.model, self.tokenizer)

    def answered(
        self, problems: Sequence[one_page.Problem], begun: Sequence[Tensor] | None = None, *, greedy: bool = False
    ) -> tuple[list[Tensor], list[float]]:
        """Complete prompts, or what has begun behind them, 256 at a time; whole completions and their rewards."""
        begun = [torch.zeros(0, dtype=torch.int64)] * len(problems) if begun is None else begun
        rows, pairs = list[Tensor](), list(zip(problems, begun, strict=True))
        for start in range(0, len(pairs), 256):
            some = pairs[start : start + 256]
            drawn = self.engine(
                [[*problem.prompt, *row.tolist()] for problem, row in some],
                max_completion_length=self.settings.max_tokens, temperature=self.settings.temperature,
                keys=None if greedy else torch.randint(2**31, (len(some), 1)).tolist(),
            )  # fmt: skip
            rows += [torch.cat([row, torch.tensor(ids)]) for (_, row), ids in zip(some, drawn.ids(), strict=True)]
        return rows, [one_page.reward(row, it, self.tokenizer) for row, it in zip(rows, problems, strict=True)]

    def values(self, problem: one_page.Problem, begun: Sequence[Tensor], count: int) -> Tensor:
        """Share of `count` continuations of each beginning that are right, (len(begun),)."""
        again = [row for row in begun for _ in range(count)]
        return torch.tensor(self.answered([problem] * len(again), again)[1]).view(len(begun), count).mean(1)
