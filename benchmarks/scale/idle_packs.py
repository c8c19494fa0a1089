"""Measure packs on a CPU: what one of a single token takes beside a full one."""

import statistics
import time

import torch

from benchmarks.harness.workloads import SEED, random_model
from cfa_kernels.hf.model_walk import ModelWalk
from cfa_kernels.hf.tree_forward import packed_hidden, tree_attention_mode
from cfa_kernels.packing.packs import idle_pack, lay_out
from cfa_kernels.packing.prefix_tree import Query

MODEL, ROWS, SEQUENCE = "qwen3-40m", 2048, 256


def seconds(name: str = MODEL, rows: int = ROWS, rounds: int = 3) -> tuple[float, float]:
    """Median seconds of a forward of one token, and of `rows` in sequences of `SEQUENCE`, on a CPU in one process."""
    model = random_model(name, device=torch.device("cpu"), dtype=torch.float32)
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(2, model.config.vocab_size, (rows // SEQUENCE, SEQUENCE), generator=generator).numpy()
    (full,) = lay_out([[Query(row, 0, row[:0]) for row in ids]], rows)
    walk = ModelWalk.of(model)
    took: dict[int, list[float]] = {0: [], 1: []}
    with torch.no_grad(), tree_attention_mode(walk):
        for _ in range(rounds + 1):  # the first warms up
            for i, pack in enumerate((idle_pack(), full)):
                start = time.perf_counter()
                packed_hidden(walk, pack)
                took[i].append(time.perf_counter() - start)
    idle, whole = (statistics.median(took[i][1:]) for i in (0, 1))
    return idle, whole
