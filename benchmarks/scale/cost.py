"""Cost of a forward on one of many GPUs that hold a model in pieces: products, bytes gathered; and what Ray carries."""

from dataclasses import dataclass

import torch

from benchmarks.explain.batch import ROWS, training_rows
from benchmarks.explain.rates import Rates
from benchmarks.explain.step import Training, configuration, policy_on_meta
from benchmarks.harness.workloads import Rollouts
from benchmarks.scale.replay import BACKWARD
from cfa_kernels.hf.model import causal_lm

NODE = 8
"""GPUs of a node, joined by NVLink."""

INSIDE = 360e9
"""Bus bandwidth of an all-gather among the 8 H100 of a node, bytes/s: reported in NVIDIA/nccl-tests issue 326, where an
author of NCCL expects it. An H200 has the same NVLink."""

ACROSS = 200e9
"""Bus bandwidth of an all-gather of 2 GB among 256 H100 in 32 nodes with eight adapters each, bytes/s: reported in
NVIDIA/nccl issue 1218, as low."""

INT64, FLOAT32 = 8, 4


@dataclass(frozen=True)
class Sharded:
    """A model in pieces on `ranks` GPUs, all of whose weights train.

    Attributes:
        layers: weights that each row is multiplied by, the head left out.
        weights: all of them.
        itemsize: bytes of a gathered weight.
        training_rows: most rows of a forward with gradients.
        rates: of the GPU.
        ranks: how many.
    """

    layers: int
    weights: int
    itemsize: int
    training_rows: int
    rates: Rates
    ranks: int = 1

    @staticmethod
    def of(model: str, rates: Rates) -> "Sharded":
        """Read the sizes of a preset or a `config.json`, in bfloat16; nothing has memory."""
        policy = policy_on_meta(configuration(model), Training(0))
        causal = causal_lm(policy)
        outside = {id(module.weight) for module in (causal.get_input_embeddings(), causal.get_output_embeddings())}
        sizes = {id(weight): weight.numel() for weight in policy.parameters()}
        layers = sum(size for key, size in sizes.items() if key not in outside)
        return Sharded(layers, sum(sizes.values()), causal.dtype.itemsize, training_rows(policy, rates.memory), rates)

    @property
    def bytes(self) -> int:
        """Bytes of all weights, as they are gathered."""
        return self.weights * self.itemsize

    def moving(self, size: float) -> float:
        """Seconds in which `size` bytes are gathered from all ranks, or summed and scattered over them."""
        return size * (self.ranks - 1) / self.ranks / (INSIDE if self.ranks <= NODE else ACROSS)

    def forward(self, rows: int) -> float:
        """Seconds of a forward of some rows: products, or gathering if that is longer, as the two run side by side."""
        return max(self.products(rows), self.moving(self.bytes))

    def update(self, rows: int) -> float:
        """Seconds of a forward with its backward: gathered twice, float32 gradients summed once."""
        moved = self.moving(2 * self.bytes + self.weights * FLOAT32)
        return max((1 + BACKWARD) * self.products(rows), moved)

    def products(self, rows: float) -> float:
        """Seconds of the products of a forward of some rows, without the head."""
        return self.rates.products(2 * self.layers * rows, torch.bfloat16)


SCORING_ROWS = ROWS
"""Most rows of a forward without gradients on a GPU (`cfa_kernels.hf.limits`)."""


@dataclass(frozen=True)
class Traffic:
    """Bytes per completion between a controller and its workers, by dtypes: ids and edges int64, log-probs float32.

    Attributes:
        requests: K + 1 requests of prompt and completion, as verl is asked, with what they bring back.
        answers: of these, what comes back.
        tree: ids, spans and answer once, the prompt once a group, and K + 1 numbers back.
        weights: one per token.
    """

    requests: float
    answers: float
    tree: float
    weights: float


def traffic(rollouts: Rollouts) -> Traffic:
    """Count the bytes for the completions of rollouts, in the mean."""
    job = rollouts.job
    sent = back = tree = weights = 0.0
    for prompt, completion, spans in zip(job.prompts, job.completions, job.spans, strict=True):
        p, t, k = len(prompt), len(completion), len(spans)
        # input_ids, position_ids of both; prompts; loss_mask, responses and response_mask
        sent += (k + 1) * (3 * p + 5 * t) * INT64
        back += (k + 1) * (p + t) * FLOAT32
        tree += (p / rollouts.group + t + 2 * (k + 1)) * INT64 + (k + 1) * FLOAT32
        weights += t * FLOAT32
    count = len(job.completions)
    return Traffic((sent + back) / count, back / count, tree / count, weights / count)
