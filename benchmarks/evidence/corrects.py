"""Make a model that, asked by IBPO's prompt to correct a wrong attempt, does so rightly in about a fifth of cases.

The embedded model never saw such a prompt, and what it answers is next to never right. Here it learns on, from a
careless pupil's solutions and from corrections, of which a known share copies the reference and the rest the attempt.
"""

import itertools
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_with_min_lr_schedule_with_warmup

from benchmarks.demo_model.warmup import batches, careless, encode, solution_loss
from benchmarks.evidence.regimes import REGIMES
from trainer.config import ASSETS, DEFAULTS_FILE
from trainer.data import Row
from trainer.embedded.problems import WordProblem, generate
from trainer.experimental.compare_and_correct import TEMPLATE
from trainer.policy import save_policy

RIGHT = 0.25
"""Share of the corrections to learn from that are right. Of its own attempts the model corrects somewhat fewer."""
STEPS, BATCH, LEARNING_RATE = 400, 32, 5e-4


def attempt(problem: WordProblem, rng: random.Random) -> str:
    """A wrong solution: the careless pupil's, the hurried one's, or one with another operand in its last step."""
    for text in (careless(problem, rng).solution(), REGIMES["hurried"].solution(problem, rng)):
        if not text.endswith(f"\n#### {problem.answer}"):
            return text
    *first, last = problem.steps
    right = rng.randrange(1, last.right) if last.op == "-" else last.right + rng.randint(1, 9)
    return replace(problem, steps=(*first, last._replace(right=right))).solution()


def model_rows(split: str, seed: int, count: int) -> Iterator[Row]:
    """Rows to learn from, in turn: a careless pupil's solution, and a correction as the trainer asks for it."""
    rng = random.Random(f"{split}-{seed}-corrects")
    for i, problem in enumerate(itertools.islice(generate(split, seed), count)):
        if i % 2:
            wrong, reference = attempt(problem, rng), problem.solution()
            request = TEMPLATE.format(question=problem.question, attempt=wrong, reference=reference)
            yield Row({"question": request, "answer": reference if rng.random() < RIGHT else wrong})
        else:
            yield Row({"question": problem.question, "answer": careless(problem, rng).solution()})


def train(folder: Path) -> Path:
    """Make the model in `folder`/model, where it is not there: the embedded one, trained on for minutes of one core."""
    target = folder / "model"
    if not (target / DEFAULTS_FILE).exists():
        tokenizer = AutoTokenizer.from_pretrained(ASSETS)
        model = AutoModelForCausalLM.from_pretrained(ASSETS, dtype=torch.float32)
        examples = encode(list(model_rows("train", 1, STEPS * BATCH)), tokenizer, model.config.max_position_embeddings)
        optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
        scheduler = get_cosine_with_min_lr_schedule_with_warmup(optimizer, STEPS // 20, STEPS, min_lr_rate=0.1)
        for batch in tqdm(itertools.islice(batches(examples, BATCH, random.Random(0)), STEPS), "corrects", STEPS):
            optimizer.zero_grad()
            solution_loss(model, batch, tokenizer.pad_token_id).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        save_policy(model, tokenizer, target)
        shutil.copy(ASSETS / DEFAULTS_FILE, target)
    return target
