"""Race packed trees against log-prob requests, which share no prefixes, where two processes hold one model in pieces.

Both score the same real completions under FSDP2 over gloo, on a CPU, in turns, and must find the same scores. Trees go
the way of a host's workers (`cfa_kernels.integrations.workers`). A request is one row for the answer as it is and one
for each span masked; those of a completion are equally long and make one forward without padding, so that no prefix is
shared and nothing else is wasted. Hosts compute log-probs of all tokens of a request; the race has that, and beside it
requests whose head reads the answer only.
"""

import copy
import datetime
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from benchmarks.harness.workloads import MODELS, SEED, VOCABULARY, gsm8k_job
from cfa_kernels.integrations.workers import Share, deal, judge_share
from cfa_kernels.scoring.batch import Row, ScoredBatch

MODEL, LAYERS, PROBLEMS, PROCESSES = "qwen3-40m", 2, 4, 2
SECONDS = 600.0
"""Deadline of the processes."""
TOLERANCE = 1e-4
"""Most that scores of two contenders may differ by, nats."""


def race(rounds: int = 3, *, model: str = MODEL, layers: int = LAYERS, problems: int = PROBLEMS) -> dict[str, Any]:
    """Race the contenders; the first round warms up.

    Returns:
        `contenders`, each with its `tokens` fed, `forwards` of a process, `cpu_seconds` of all processes and `seconds`
        (medians, and those of each round); `difference`, the largest between scores, in nats; and what was scored.

    Raises:
        ValueError: fewer problems than processes.
        TimeoutError: the processes do not end within their deadline.
        RuntimeError: one of them fails, or scores differ.
    """
    if problems < PROCESSES:
        raise ValueError(f"problems must be at least {PROCESSES}, one for each process, got {problems}")
    job = gsm8k_job(problems)
    batch = ScoredBatch.of(
        None, job.prompts, job.completions, job.spans, job.answers, placeholder_id=job.placeholder_id
    )  # fmt: skip
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        given = (folder, batch, model, layers, rounds, found)
        started = [context.Process(target=_run, args=(rank, *given), daemon=True) for rank in range(PROCESSES)]
        for process in started:
            process.start()
        end = time.monotonic() + SECONDS
        for process in started:
            process.join(end - time.monotonic())
        ended = [process.exitcode for process in started]
        for process in started:
            process.kill()
    if None in ended:
        raise TimeoutError(f"{PROCESSES} processes that race did not end in {SECONDS} s")
    if ended != [0] * PROCESSES:
        raise RuntimeError(f"{PROCESSES} processes that race ended with exit codes {ended}, expected 0")
    said: dict[str, Any] = found.get()
    if said["difference"] > TOLERANCE:
        raise RuntimeError(f"scores differ by {said['difference']:.2g} nats, expected at most {TOLERANCE}")
    said["model"] = {"name": model, "layers": layers, "vocabulary": VOCABULARY, "dtype": "float32"}
    return said | {"job": job.describe(), "processes": PROCESSES, "rounds": rounds}


def shares(raced: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The trees' share of what each other contender takes, by figure."""
    trees, *_ = raced["contenders"].values()
    figures = ("tokens", "cpu_seconds", "seconds")
    return {
        name: {figure: trees[figure] / other[figure] for figure in figures}
        for name, other in raced["contenders"].items()
        if other is not trees
    }


Contender = Callable[[], tuple[dict[int, Tensor], int, int]]
"""Scores the share of a process: scores (1 + K,) by number of the completion, tokens fed, forwards."""


def _run(rank: int, folder: str, batch: ScoredBatch, name: str, layers: int, rounds: int, found: Any) -> None:
    torch.set_num_threads(1)
    deadline = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=PROCESSES, timeout=deadline
    )
    torch.manual_seed(SEED)
    config = copy.deepcopy(MODELS[name])
    config.num_hidden_layers = layers
    config.layer_types, config.vocab_size = config.layer_types[:layers], VOCABULARY
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    own, asked = (batch.take(dealt[rank]) for dealt in (deal(batch, PROCESSES), _as_many_each(batch)))
    contenders: dict[str, Contender] = {
        "trees": partial(_trees, model, own),
        "requests": partial(_requests, model, asked, every=True),
        "requests, head on the answer": partial(_requests, model, asked, every=False),
    }
    said = {contender: _Times() for contender in contenders}
    scores: dict[str, dict[int, Tensor]] = {}
    for _ in range(1 + rounds):
        for contender, run in contenders.items():
            scores[contender] = said[contender].take(run)
    first, *others = scores.values()
    difference = max((first[b] - other[b]).abs().max().item() for other in others for b in first)
    if rank == 0:
        figures = {contender: times.figures() for contender, times in said.items()}
        found.put({"contenders": figures, "difference": difference})
    dist.barrier()  # one that ends while the other still talks to it may abort
    dist.destroy_process_group()


class _Times:
    """Times of a contender over all processes, round by round."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.tokens = self.forwards = 0

    def take(self, run: Contender) -> dict[int, Tensor]:
        """Run the contender on all processes at once; returns the scores of all."""
        dist.barrier()
        start, before = time.perf_counter(), time.process_time()
        scores, tokens, self.forwards = run()
        used = time.process_time() - before
        dist.barrier()
        self.seconds.append(time.perf_counter() - start)
        total = torch.tensor([used, float(tokens)], dtype=torch.float64)
        dist.all_reduce(total)
        self.cpu_seconds.append(total[0].item())
        self.tokens = int(total[1].item())
        everybody: list[Any] = [None] * PROCESSES
        dist.all_gather_object(everybody, scores)
        return {number: score for part in everybody for number, score in part.items()}

    def figures(self) -> dict[str, Any]:
        """The figures, without the first round's."""
        cpu, wall = self.cpu_seconds[1:], self.seconds[1:]
        return {
            "tokens": self.tokens,
            "forwards": self.forwards,
            "cpu_seconds": statistics.median(cpu),
            "cpu_seconds_rounds": cpu,
            "seconds": statistics.median(wall),
            "seconds_rounds": wall,
        }


def _trees(model: nn.Module, own: ScoredBatch) -> tuple[dict[int, Tensor], int, int]:
    found = judge_share(model, Share(lambda access, batch: access.score(batch), own)).result
    scores = {b: torch.cat([found.base[i : i + 1], found.masked[i]]) for i, b in enumerate(own.numbers)}
    return scores, found.work.tokens_fed, found.work.forwards


def _as_many_each(batch: ScoredBatch) -> list[list[int]]:
    """Deal completions so that all processes have as many, and about as many tokens: forth and back, largest first."""
    order = sorted(range(len(batch)), key=lambda i: -_rows(batch.rows[i]))
    turns = [*range(PROCESSES), *reversed(range(PROCESSES))]
    return [[i for place, i in enumerate(order) if turns[place % len(turns)] == rank] for rank in range(PROCESSES)]


def _rows(row: Row) -> int:
    assert row.answer is not None
    return (1 + len(row.spans)) * (len(row.prompt) + row.answer.end)


@torch.no_grad()
def _requests(model: nn.Module, own: ScoredBatch, *, every: bool) -> tuple[dict[int, Tensor], int, int]:
    scores, tokens = {}, 0
    for b, row in zip(own.numbers, own.rows, strict=True):
        assert row.answer is not None
        end, size = len(row.prompt) + row.answer.end, row.answer.end - row.answer.start
        sampled = torch.cat([torch.tensor(row.prompt), torch.tensor(row.completion)])[:end]
        masked = [torch.tensor(row.masked(k, own.placeholder_id))[:end] for k in range(len(row.spans))]
        ids = torch.stack([sampled, *masked])
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=0 if every else size + 1).logits
        following = ids.roll(-1, dims=1)[:, -logits.shape[1] :]
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none")
        scores[b] = -losses.view(following.shape)[:, -size - 1 : -1].sum(1)
        tokens += ids.numel()
    return scores, tokens, len(own)
