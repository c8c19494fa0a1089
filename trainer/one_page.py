"""The whole method on one page: sample, reward, credit, packed loss, optimizer step, evaluation.

Read it from top to bottom, copy it, change it. One process, no checkpoints, no report: `cfa-train` has those.

    python -m trainer.one_page                                            # the small model of the program, on a CPU
    python -m trainer.one_page --model Qwen/Qwen3-1.7B --problems gsm8k.jsonl --steps 100 --learning-rate 1e-6
"""

import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from cfa_kernels import (
    CounterfactualConfig,
    LossBatch,
    Rows,
    TrainingForward,
    counterfactual_credit,
    find_answer,
    packed_forward,
)

from .embedded.problems import generate
from .rewards.numbers import parse_number
from .rollouts.engine import end_ids

INSTRUCTION = "Solve the problem step by step. End with a line of the form: #### <number>"


@dataclass
class Settings:
    """Settings of a run."""

    model: str = str(Path(__file__).parent / "embedded" / "assets")
    """Folder or hub name of a causal model; by default the small one that comes with the program."""
    problems: str | None = None
    """JSON lines with `question` and `answer` ("... #### 72"); by default generated word problems."""
    steps: int = 12
    """Optimizer steps."""
    prompts_per_step: int = 16
    """Problems of a step."""
    group: int = 8
    """Completions of a problem, which are compared with each other."""
    max_tokens: int = 80
    """Longest completion."""
    learning_rate: float = 2e-4
    """Learning rate of AdamW."""
    temperature: float = 1.0
    """Temperature of sampling and of the loss."""
    held_out: int = 128
    """Problems of the evaluation, which are not trained on."""
    credit: bool = True
    """Whether tokens are weighed by counterfactual credit; without it the step is plain DAPO."""
    seed: int = 0
    """Seed of everything that is drawn."""


@dataclass
class Problem:
    """A prompt, as token ids, and the number that answers it."""

    prompt: list[int]
    answer: str


def main(settings: Settings) -> list[float]:
    """Train; return the accuracy before and after."""
    torch.manual_seed(settings.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    model: Any = AutoModelForCausalLM.from_pretrained(settings.model)
    model.to(device).eval()  # no dropout, in training too
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    train, held_out = load(settings, tokenizer)
    order = random.Random(settings.seed)

    accuracies = [evaluate(model, tokenizer, held_out, settings)]
    print(f"step 0: {accuracies[0]:.1%} of {len(held_out)} held-out problems")
    for step in range(1, settings.steps + 1):
        problems = order.sample(train, settings.prompts_per_step)
        reward, loss = training_step(model, tokenizer, optimizer, problems, settings, step)
        print(f"step {step}: reward {reward:.2f}, loss {loss:+.4f}")
    accuracies.append(evaluate(model, tokenizer, held_out, settings))
    print(f"step {settings.steps}: {accuracies[1]:.1%} of {len(held_out)} held-out problems")
    return accuracies


def training_step(
    model: Any,
    tokenizer: Any,
    optimizer: torch.optim.Optimizer,
    problems: list[Problem],
    settings: Settings,
    step: int,
) -> tuple[float, float]:
    """Take one step on B = problems x group completions; return mean reward and loss."""
    # 1. Sample a group of completions for each problem.
    rollouts = [problem for problem in problems for _ in range(settings.group)]
    rows = sample(model, tokenizer, rollouts, settings)

    # 2. Reward each by its answer, and compare it with its group.
    rewards = torch.tensor([reward(row, it, tokenizer) for row, it in zip(rows.completions, rollouts, strict=True)])
    groups = rewards.view(-1, settings.group)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()  # (B,)
    if not advantages.any():  # all groups agree: there is nothing to learn from
        return rewards.mean().item(), 0.0

    # 3. Run the model on one packed tree of prompts and completions, each prompt once.
    contributes = (advantages != 0).tolist()
    needed = [len(row) if some else 0 for row, some in zip(rows.completions, contributes, strict=True)]
    forward = packed_forward(model, rows, needed=needed, keep_states=True)

    # 4. Credit: mask each span of the reasoning, score the answer from the keys and values of that forward, and turn
    #    the drops of its log-prob into a weight for each token.
    weights = None
    if settings.credit:
        config = CounterfactualConfig(normalize="mean")
        access = TrainingForward(forward)
        weights = counterfactual_credit(access, tokenizer, rows, advantages=advantages, config=config).weights

    # 5. The clipped token loss of DAPO, from the hidden states of the same forward, and its gradient.
    batch = LossBatch.of(rows, None, advantages, weights=weights, temperature=settings.temperature)  # None: on-policy
    loss = forward.policy_loss(batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return rewards.mean().item(), loss.item()


@torch.no_grad()
def sample(model: Any, tokenizer: Any, problems: list[Problem], settings: Settings, *, greedy: bool = False) -> Rows:
    """Complete the prompts, greedily or from the policy that the loss computes."""
    prompts = [torch.tensor(problem.prompt) for problem in problems]
    batch = tokenizer.pad({"input_ids": [it.prompt for it in problems]}, padding_side="left", return_tensors="pt")
    options: dict[str, Any] = dict(max_new_tokens=settings.max_tokens, do_sample=not greedy)
    if not greedy:  # without top_k and top_p, generate cuts the distribution off by the model's own configuration
        options |= dict(temperature=settings.temperature, top_k=0, top_p=1.0)
    ends = end_ids(model, tokenizer)
    ids = model.generate(**batch.to(model.device), **options, eos_token_id=ends).cpu()
    return Rows(prompts, [until_end(row, ends) for row in ids[:, batch["input_ids"].shape[1] :]])


def until_end(completion: Tensor, ends: list[int]) -> Tensor:
    """Cut a completion (T,) after the first token that ends one."""
    places = torch.isin(completion, torch.tensor(ends)).nonzero()
    return completion[: int(places[0]) + 1] if len(places) else completion


def reward(completion: Tensor, problem: Problem, tokenizer: Any) -> float:
    """Return 1 if the completion's answer is the problem's, else 0."""
    span = find_answer(completion, tokenizer, prompt=problem.prompt)
    return float(span is not None and number(tokenizer.decode(completion[slice(*span)])) == problem.answer)


def evaluate(model: Any, tokenizer: Any, problems: list[Problem], settings: Settings) -> float:
    """Measure the share of problems that the model solves greedily."""
    rows = sample(model, tokenizer, problems, settings, greedy=True)
    pairs = zip(rows.completions, problems, strict=True)
    return sum(reward(completion, problem, tokenizer) for completion, problem in pairs) / len(problems)


def load(settings: Settings, tokenizer: Any) -> tuple[list[Problem], list[Problem]]:
    """Load problems to train and to evaluate on."""
    if settings.problems is None:
        pairs = [
            [(problem.question, problem.solution()) for problem in itertools.islice(generate(split, 1), count)]
            for split, count in (("train", 2048), ("test", settings.held_out))
        ]
    else:
        lines = [json.loads(line) for line in Path(settings.problems).read_text("utf-8").splitlines()]
        rows = [(f"{line['question']}\n{INSTRUCTION}", line["answer"]) for line in lines]
        pairs = [rows[settings.held_out :], rows[: settings.held_out]]
    train, held_out = ([Problem(encode(q, tokenizer), number(a.rsplit("####")[-1])) for q, a in part] for part in pairs)
    return train, held_out


def encode(question: str, tokenizer: Any) -> list[int]:
    """Write a question as the model's chat template asks it."""
    message = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]


def number(text: str) -> str:
    """Write a number in one way, whatever its form; a text that is none stays."""
    value = parse_number(text.strip().rstrip("%. "))
    return text.strip() if value is None else str(value)


if __name__ == "__main__":
    main(tyro.cli(Settings))
