"""Count what a contender feeds a model: tokens, forwards, head rows and floating-point operations."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.harness.workloads import Job, head_dim
from cfa_kernels.model.check.verify import check_supported


@dataclass
class Work:
    """Counts of what went through a model between two points.

    Attributes:
        forwards: calls of the transformer.
        tokens_fed: tokens it was given, padding included.
        head_rows: rows the head was applied to.
        flops: multiply-adds, twice, in linear layers and attention. Norms, rotations and softmax are left out.
    """

    forwards: int = 0
    tokens_fed: int = 0
    head_rows: int = 0
    flops: float = 0.0

    def facts(self) -> dict[str, float]:
        return asdict(self)


def attention_flops(config: Any, pairs: float) -> float:
    """Operations of QK^T and PV over all layers, for `pairs` visible (query, key) pairs."""
    return 4.0 * config.num_attention_heads * head_dim(config) * config.num_hidden_layers * pairs


def tree_pairs(job: Job) -> float:
    """Visible pairs of the packed tree: prompts once, completions once, branches from their span's start."""
    pairs, seen = 0.0, set()
    for prompt, answer, spans in zip(job.prompts, job.answers, job.spans, strict=True):
        p, rows = len(prompt), answer.end - 1
        if (key := tuple(prompt.tolist())) not in seen:
            seen.add(key)
            pairs += _causal(p, 0)
        pairs += _causal(rows, p)
        pairs += sum(_causal(rows - span.start, p + span.start) for span in spans)
    return pairs


def _causal(length: int, past: int) -> float:
    """Pairs of `length` queries that see `past` keys and themselves causally."""
    return length * past + length * (length + 1) / 2


@contextlib.contextmanager
def counted(model: PreTrainedModel, tree: Job | None = None) -> Iterator[Work]:
    """Count what runs through a transformers causal model inside the `with` block.

    `tree`: the job whose packed tree is fed, for contenders whose rows do not attend to all that comes before.
    """
    work, config = Work(), model.config
    head, trunk = model.get_output_embeddings(), model.base_model
    packed_done = False

    def linear(module: nn.Linear, args: tuple[Tensor, ...], output: Tensor) -> None:
        rows = output.numel() // module.out_features
        work.flops += 2.0 * module.in_features * module.out_features * rows
        work.head_rows += rows if module is head else 0

    def forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal packed_done
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        past = cache.get_seq_length() if cache is not None else 0
        ids = args[0] if args else kwargs.get("input_ids")
        batch, length = (ids if ids is not None else kwargs["inputs_embeds"]).shape[:2]
        work.forwards += 1
        work.tokens_fed += batch * length
        if tree is None:
            work.flops += attention_flops(config, batch * _causal(length, past))
        elif not packed_done:
            packed_done = True
            work.flops += attention_flops(config, tree_pairs(tree))

    hooks = [m.register_forward_hook(linear) for m in model.modules() if isinstance(m, nn.Linear)]
    hooks.append(trunk.register_forward_pre_hook(forward, with_kwargs=True))
    try:
        if tree is not None:
            check_supported(model)  # again, as it has hooks
            work, packed_done = Work(), False
        yield work
    finally:
        for hook in hooks:
            hook.remove()
    if tree is not None and not work.head_rows:  # a fused head is not a module
        answers = zip(tree.answers, tree.spans, strict=True)
        work.head_rows = sum((answer.end - answer.start) * (1 + len(spans)) for answer, spans in answers)
        work.flops += 2.0 * config.hidden_size * config.vocab_size * work.head_rows
