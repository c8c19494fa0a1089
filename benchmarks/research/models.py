"""A model that is asked: it answers problems, from their beginning or from some tokens on."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from cfa_kernels.text.patterns import ANNOTATION
from trainer.data import Row, encode_prompt, load_rows, take_examples
from trainer.rewards.built_in import INSTRUCTIONS
from trainer.rewards.numbers import final_number, gold_number
from trainer.rollouts.in_process import TransformersEngine
from trainer.settings import GENERATED

INSTRUCTION = INSTRUCTIONS["numbers"]
GENERATED_PROBLEMS = 2048


@dataclass(frozen=True)
class Problem:
    """A prompt, as token ids, and the number that answers it, as text."""

    prompt: list[int]
    answer: str


def posed(rows: Sequence[Row], tokenizer: Any, *, examples: Sequence[Row] = (), instruction: str = "") -> list[Problem]:
    """Write questions as the tokenizer's chat template asks them, behind solved examples as earlier turns."""
    return [
        Problem(
            encode_prompt(row["question"], tokenizer, instruction=instruction, examples=examples),
            row["answer"].rpartition("####")[2].strip(),
        )
        for row in rows
    ]  # fmt: skip


def read_problems(tokenizer: Any, file: str, *, examples: int = 0, computations: int = 0) -> list[Problem]:
    """Read and pose the problems of a file with `question` and `answer`; "" stands for generated ones.

    Args:
        tokenizer: of the model that is asked.
        file: JSON lines, or what `trainer.data.load_rows` reads.
        examples: solved problems before every question, not asked, which `trainer.data.take_examples` takes.
        computations: most computations of a solution, by GSM8K's marks; 0 for any.

    Raises:
        ValueError: rows that cannot be read, or too few; a tokenizer that writes no chat, or ends no text.
    """
    for name, meaning in (("chat_template", "chat template"), ("eos_token", "end-of-text token")):
        if getattr(tokenizer, name) is None:
            raise ValueError(
                f"model {tokenizer.name_or_path}: its tokenizer has no {meaning}, so it cannot be asked; name an "
                f"instruct model, or set {name} in its tokenizer_config.json"
            )
    rows = load_rows(file or GENERATED, split="train", count=None if file else GENERATED_PROBLEMS)
    sizes = [len(re.findall(ANNOTATION, row["answer"])) for row in rows]
    kept = [row for row, n in zip(rows, sizes, strict=True) if not file or not computations or 0 < n <= computations]
    if len(kept) <= examples:
        raise ValueError(
            f"problems {file}: {len(kept)} of its {len(rows)} rows can be asked (computations={computations}), "
            f"and {examples} are examples; name a larger file, or raise computations"
        )
    solved, kept = take_examples(kept, examples)
    return posed(kept, tokenizer, examples=solved, instruction=bool(file) * INSTRUCTION)


def require_mixed(rewards: Tensor) -> dict[str, float]:
    """Shares of right completions and of mixed groups, of rewards (N, G); raises `ValueError` if no group is mixed."""
    right, mixed = float(rewards.mean()), float((rewards != rewards[:, :1]).any(1).float().mean())
    if not mixed:
        easier = "ask easier ones (computations), behind examples, with more max_tokens, or train it on solutions first"
        raise ValueError(
            f"model: {right:.0%} of {rewards.numel()} completions of {len(rewards)} problems are right, and no problem "
            f"has right and wrong ones, so there is nothing to learn; {easier if right < 0.5 else 'ask harder ones'}"
        )
    return {"right": right, "mixed": mixed}


def clock(device: torch.device) -> float:
    """Seconds of the processor; of a GPU those by the wall, when it has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


class Subject:
    """A model in eval mode, its tokenizer, and how it is sampled."""

    def __init__(self, model: str, *, max_tokens: int = 80, temperature: float = 1.0, dtype: str = "float32") -> None:
        self.max_tokens, self.temperature = max_tokens, temperature
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        on_gpu = torch.cuda.is_available()
        self.model.to("cuda" if on_gpu else "cpu").eval()
        self.engine, self.rows_at_once = TransformersEngine(self.model, self.tokenizer), 1024 if on_gpu else 256

    def completed(self, prompts: Sequence[list[int]], begun: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Complete prompts, or what has begun behind them; whole completions, each with what it began with."""
        begun = [torch.zeros(0, dtype=torch.int64)] * len(prompts) if begun is None else begun
        rows, pairs = list[Tensor](), list(zip(prompts, begun, strict=True))
        for start in range(0, len(pairs), self.rows_at_once):
            some = pairs[start : start + self.rows_at_once]
            drawn = self.engine(
                [[*prompt, *row.tolist()] for prompt, row in some],
                max_completion_length=self.max_tokens, temperature=self.temperature,
                keys=torch.randint(2**31, (len(some), 1)).tolist(),
            )  # fmt: skip
            rows += [torch.cat([row, torch.tensor(ids)]) for (_, row), ids in zip(some, drawn.ids(), strict=True)]
        return rows

    def answered(
        self, problems: Sequence[Problem], begun: Sequence[Tensor] | None = None
    ) -> tuple[list[Tensor], list[float]]:
        """Complete problems as `completed` does; completions and their rewards."""
        rows = self.completed([problem.prompt for problem in problems], begun)
        return rows, [self.reward(row, problem) for row, problem in zip(rows, problems, strict=True)]

    def number(self, completion: Tensor) -> Fraction | None:
        """Read the number that a completion gives as its answer."""
        return final_number(self.tokenizer.decode(completion, skip_special_tokens=True))

    def reward(self, completion: Tensor, problem: Problem) -> float:
        """Return 1 if the completion's answer is the problem's, else 0."""
        own = self.number(completion)
        return float(own is not None and own == gold_number(problem.answer))

    def values(self, problems: Sequence[Problem], begun: Sequence[Tensor], count: int) -> Tensor:
        """Share of `count` continuations of each beginning that are right, (len(begun),)."""
        asked, again = ([one for one in column for _ in range(count)] for column in (problems, begun))
        return torch.tensor(self.answered(asked, again)[1]).view(len(begun), count).mean(1)
