"""Add counterfactual credit to TRL's experimental AsyncGRPO, and run its tree without FlashAttention 3."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from .. import CounterfactualConfig
from ..credit.config import as_config
from ..credit.deferred import BatchKeys
from ..model.attention import TreeMask, attend
from ..model.parts import causal_lm, configs
from ..model.stateful_layers import has_cells
from ..rows import Rows
from ..scoring.access import InProcess
from ..tree.attention_options import Reach
from ..tree.segment_table import SegmentTable
from .credit import OFFERS, credit_rows, obstacles, refuse, unmet_needs

ATTENTION = "cfa_trl_tree"

_TABLES = WeakTensorKeyDictionary()  # a `SegmentTable` for all layers of a forward, by `tree_kv_index`


def run_trees_anywhere(model: nn.Module) -> None:
    """Let a model run the rows of TRL's `TreeRow` on any device that the library runs on, a CPU too.

    The same attention as TRL's, without copies of keys and values. Attention sinks, which TRL's omits, are in it. Call
    it on `trainer.model`, once.

    Raises:
        NotImplementedError: layers that carry a state, or attend in chunks: a `TreeRow` does not describe them.
            Attention dropout raises in the forward.
    """
    causal = causal_lm(model)
    kinds = {kind for config in configs(causal) for kind in getattr(config, "layer_types", None) or ()}
    kinds -= {"full_attention", "sliding_attention"}
    others = "layers that carry a state" if has_cells(causal) else ", ".join(sorted(kinds))
    refuse(obstacles((others, f"{others}, which {type(causal).__name__} has")), "a tree of TRL's AsyncGRPO")
    causal.set_attn_implementation(ATTENTION)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Reach | None, *,
    tree_kv_index: Tensor, tree_cu_seqlens_q: Tensor, tree_cu_seqlens_k: Tensor, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend as the library's packed forward does, along the tree that TRL's arguments describe.

    `tree_kv_index` (K,) holds the rows that each segment sees, its own last; the others (S + 1,) where each ends.
    """
    table: SegmentTable | None = _TABLES.get(tree_kv_index)
    if table is None:
        paths, ends, path_ends = (x.cpu().int().numpy() for x in (tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k))
        lengths = np.diff(ends)
        table = SegmentTable(ends[:-1], lengths, path_ends[:-1], np.diff(path_ends) - lengths, paths)
        _TABLES[tree_kv_index] = table
    reach = attention_mask or Reach(window=options.get("sliding_window"))
    return attend(module, query, key, value, TreeMask(table, reach), **options)


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, lambda local_size=None, **_: Reach(window=local_size))


class CounterfactualAsyncMixin:
    """Add credit to `AsyncGRPOTrainer`: `class Mine(CounterfactualAsyncMixin, AsyncGRPOTrainer)`.

    Each micro-batch is credited right before its loss, by the policy as it is then. A row is a sample of TRL's, from
    its first trained token to its last; what it does not train, as a tool's text, is neither answer nor unit.

    Args:
        *args, **kwargs: the trainer's own.
        credit: a `CounterfactualConfig` or the name of a preset; None for no credit.

    Raises:
        NotImplementedError: an estimator or setting that credit cannot be combined with, each named.
    """

    def __init__(self, *args: Any, credit: CounterfactualConfig | str | None = None, **kwargs: Any) -> None:
        self.credit = as_config(credit)
        refuse(unmet_needs(self.credit, OFFERS["TRL, AsyncGRPO"]))
        super().__init__(*args, **kwargs)
        own: Any = self
        processes = own.accelerator.num_processes
        refuse(obstacles((processes > 1, f"{processes} processes: run AsyncGRPO in one")))
        self._keys = BatchKeys(own.args.seed)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Compute TRL's loss with credited advantages."""
        own: Any = self
        if self.credit.control != "off":
            rows, masks, advantages = _rows_of(inputs)
            credited, figures = credit_rows(
                own.processing_class, rows, masks, advantages, InProcess(causal_lm(model)), config=self.credit,
                seed=self._keys.key(own.state.global_step), groups=torch.arange(len(rows)),
                rewards=torch.zeros(len(rows)),
            )  # fmt: skip
            terms = torch.cat([row[mask.bool()] for row, mask in zip(credited, masks, strict=True)])
            values = inputs["advantages"].clone()
            values[inputs["token_index"] >= 0] = terms.to(values)
            inputs = {**inputs, "advantages": values}
            for name, figure in figures.items():
                own._metrics["train"][name].append(figure)
        return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]


def _rows_of(inputs: dict[str, Any]) -> tuple[Rows, Sequence[Tensor], Sequence[Tensor]]:
    """Read the samples off a micro-batch of one process: rows, B tensors (T_b,) of what is trained, and advantages."""

    def here(*names: str) -> list[Tensor]:
        return [inputs[name][0].cpu() for name in names]

    ids, position, labels = here("input_ids", "position_ids", "shift_labels")
    paths, ends, path_ends = here("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
    index, segment, own = here("token_index", "segment_id", "advantages")
    terms = index >= 0
    _, counts = segment[terms].unique_consecutive(return_counts=True)
    columns = [column[terms].split(counts.tolist()) for column in (index, own)]
    prompts, completions, masks, advantages = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
    for before, values in zip(*columns, strict=True):
        last = int(before[-1])
        start = path_ends[torch.searchsorted(ends, last, right=True) - 1]
        path = paths[start : start + int(position[last]) + 1]
        whole = torch.cat([ids[path], labels[last][None]])
        places = position[before] + 1
        first = int(places[0])
        prompts.append(whole[:first])
        completions.append(whole[first:])
        masks.append(torch.zeros(len(whole) - first, dtype=torch.int64).index_fill_(0, places - first, 1))
        advantages.append(torch.zeros(len(whole) - first).index_copy_(0, places - first, values.float()))
    return Rows(prompts, completions), masks, advantages
