"""The whole method on one page: sample, reward, credit, packed loss, optimizer step, evaluation.

Read it from top to bottom, copy it, change it. One process, no checkpoints, no report: `cfa-train` has those.

    python -m cfa_trainer.one_page  # the small model of the program, on a CPU; in a checkout `trainer.one_page`
    python -m cfa_trainer.one_page --model Qwen/Qwen3-1.7B --dataset gsm8k.jsonl --max_steps 100 --learning_rate 1e-6
"""

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer

from cfa_kernels import Rows, credited_loss

from .data import load_rows
from .rewards.built_in import INSTRUCTIONS
from .rewards.numbers import exact_match
from .rollouts.engine import end_ids
from .settings import ASSETS, GENERATED


@dataclass
class Settings:
    """Settings of a run, under the program's names."""

    model: str = str(ASSETS)  # folder or hub name of a causal model; by default the small one of the program
    dataset: str | None = None  # file or hub name, question and answer ("... #### 72"); by default generated problems
    max_steps: int = 12  # optimizer steps
    generation_batch_size: int = 128  # completions of a step
    num_generations: int = 8  # completions of a problem, which are compared with each other
    max_completion_length: int = 80  # tokens
    learning_rate: float = 2e-4  # of AdamW
    temperature: float = 1.0  # of sampling and of the loss
    eval_problems: int = 128  # problems of the evaluation, which are not trained on
    credit: str = "none"  # a preset, such as cf, which masks spans; none is plain DAPO
    seed: int = 0  # of everything that is drawn


class Problem(NamedTuple):
    """Prompt, as token ids, and a text that ends in the number that answers it."""

    prompt: list[int]
    answer: str


def main(settings: Settings) -> list[float]:
    """Train; return the accuracy before and after."""
    torch.manual_seed(settings.seed)
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    model: Any = AutoModelForCausalLM.from_pretrained(settings.model)
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()  # no dropout, in training too
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    train, held_out = load(settings, tokenizer)
    if len(train) < (groups := settings.generation_batch_size // settings.num_generations):
        raise SystemExit(f"error: {len(train)} problems are not held out, and a step takes {groups}; give more rows")
    order = random.Random(settings.seed)
    before = evaluate(model, tokenizer, held_out, settings)
    for step in range(1, settings.max_steps + 1):
        problems = order.sample(train, groups)
        reward, loss = training_step(model, tokenizer, optimizer, problems, settings)
        print(f"step {step}: reward {reward:.2f}, loss {loss:+.4f}")
    return [before, evaluate(model, tokenizer, held_out, settings)]


def training_step(model: Any, tokenizer: Any, optimizer: Any, some: list[Problem], settings: Settings) -> list[float]:
    """Take one step on B = problems x num_generations completions; return mean reward and loss."""
    # 1. Sample a group of completions for each problem.
    problems = [problem for problem in some for _ in range(settings.num_generations)]
    rows = sample(model, tokenizer, problems, settings)

    # 2. Reward each by its answer, and compare it with its group.
    rewards = torch.tensor(solved(rows, problems, tokenizer))
    groups = rewards.view(-1, settings.num_generations)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()  # (B,)
    if not advantages.any():  # all groups agree: there is nothing to learn from
        return [rewards.mean().item(), 0.0]

    # 3. One forward on the packed tree of prompts and completions. Credit: mask each span of the reasoning, score the
    #    answer from the keys and values of that forward, turn the drop of its log-prob into a weight of each token.
    #    Loss: DAPO's clipped token loss with these weights, from the hidden states of the same forward.
    options: dict[str, Any] = {"credit": settings.credit, "temperature": settings.temperature}
    loss = credited_loss(model, tokenizer, rows, advantages=advantages, **options).loss  # on-policy: no old log-probs
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return [rewards.mean().item(), loss.item()]


@torch.no_grad()
def sample(model: Any, tokenizer: Any, problems: list[Problem], settings: Settings, *, greedy: bool = False) -> Rows:
    """Complete the prompts, greedily or from the policy that the loss computes."""
    prompts = [problem.prompt for problem in problems]
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(model.device)
    drawn = {} if greedy else {"temperature": settings.temperature, "top_k": 0, "top_p": 1.0}  # not the model's own
    ends, length = end_ids(model, tokenizer), settings.max_completion_length
    ids = model.generate(**batch, max_new_tokens=length, do_sample=not greedy, eos_token_id=ends, **drawn).cpu()
    ended = torch.isin(ids[:, batch["input_ids"].shape[1] :], torch.tensor(ends)).int()
    lengths = torch.where(ended.any(1), ended.argmax(1) + 1, ended.shape[1])  # the first end is the last token
    completions = [row[-ended.shape[1] :][:count] for row, count in zip(ids, lengths.tolist(), strict=True)]
    return Rows([torch.tensor(prompt) for prompt in prompts], completions)


def solved(rows: Rows, problems: list[Problem], tokenizer: Any) -> list[Any]:
    """Return 1 for each completion whose number is the problem's, else 0."""
    texts, answers = tokenizer.batch_decode(rows.completions, skip_special_tokens=True), [p.answer for p in problems]
    return exact_match(completions=texts, answer=answers, prompts=tokenizer.batch_decode(rows.prompts))


def evaluate(model: Any, tokenizer: Any, problems: list[Problem], settings: Settings) -> float:
    """Measure and print the share of problems that the model solves greedily."""
    rows = sample(model, tokenizer, problems, settings, greedy=True)
    share = sum(solved(rows, problems, tokenizer)) / len(problems)
    print(f"held-out accuracy {share:.1%} of {len(problems)} problems")
    return share


def load(settings: Settings, tokenizer: Any) -> tuple[list[Problem], list[Problem]]:
    """Load problems to train and to evaluate on, asked as the model's chat template asks them."""
    if settings.dataset is None:
        counts, ending = {"test": settings.eval_problems, "train": 2048}, ""
        rows = [row for split, count in counts.items() for row in load_rows(GENERATED, split=split, count=count)]
    else:
        rows, ending = load_rows(settings.dataset, split="train"), f"\n{INSTRUCTIONS['numbers']}"
    chats = [[{"role": "user", "content": row["question"] + ending}] for row in rows]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)["input_ids"]
    problems = [Problem(ids, row["answer"]) for ids, row in zip(prompts, rows, strict=True)]
    return problems[settings.eval_problems :], problems[: settings.eval_problems]


if __name__ == "__main__":
    main(tyro.cli(Settings, use_underscores=True))
