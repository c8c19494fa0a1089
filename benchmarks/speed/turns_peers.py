"""Collect the ways to train on rollouts that share beginnings, and to ask gold answers after every turn.

A contender takes a `Work` and leaves its gradient on the policy's parameters, or returns the gains of turns. All use
our head and loss, so that only what is fed differs.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.harness.race import Absent
from benchmarks.harness.workloads import SEED, head_dim, tokenizer, word_ids
from benchmarks.speed.peers import using_attention
from benchmarks.speed.replay import EPSILON, padded_ids
from benchmarks.speed.step_peers import VARLEN, row_states, varlen_states
from benchmarks.speed.varlen import causal_varlen_attention
from cfa_kernels import Batch, CounterfactualConfig, Rows, Span, credited_loss, packed_policy_loss
from cfa_kernels.loss.policy import linear_policy_loss
from cfa_kernels.model.limits import default_token_budget
from cfa_kernels.model.parts import causal_lm
from cfa_kernels.scoring.access import InProcess
from cfa_kernels.tree.packs import groups_within

OURS, TRL, HALF, GAIN = "ours", "TRL's tree, keys gathered", "ours, half of the turns masked", "ours, prefix gain"
ONE_FORWARD, EACH_TURN = "ours, one forward", "one forward a turn"
CREDIT = {
    HALF: CounterfactualConfig.of({"units": "turns", "target": "gold", "estimator.preselect": 0.5}),
    GAIN: CounterfactualConfig("prefix_gain", units="turns", target="gold"),
}
WHOLE = 1 << 30


@dataclass
class Work:
    """A policy, rollouts that share beginnings, and what the contender that runs has fed and kept, if it `counts`."""

    policy: nn.Module
    rows: Rows
    masks: list[Tensor]
    gold: Tensor
    different: Sequence[int]
    facts: dict[str, float] = field(default_factory=dict)
    weights: list[Tensor] | None = None
    counts: bool = True

    def __post_init__(self) -> None:
        self.causal: Any = causal_lm(self.policy)
        self.device, self.dtype = (getattr(self.causal, name) for name in ("device", "dtype"))
        self.advantages = torch.tensor([1.0 if b % 2 else -1.0 for b in range(len(self.rows))])
        self.columns = {"advantages": self.advantages, "mask": self.masks}
        self.options = {"epsilon": EPSILON, "num_items_in_batch": int(sum(mask.sum() for mask in self.masks))}

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Count inside what a forward keeps for its backward, weights left out; the most of all is kept."""
        if not self.counts:
            yield
            return
        weights = {parameter.untyped_storage().data_ptr() for parameter in self.policy.parameters()}
        kept = dict[int, int]()

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes() * (storage.data_ptr() not in weights)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield
        self.facts["kept_bytes"] = max(self.facts.get("kept_bytes", 0), sum(kept.values()))


def make_work(model: nn.Module, widths: Sequence[int], prompt: int, turn: int) -> Work:
    draws, words = torch.Generator().manual_seed(SEED), word_ids()

    def text(low: int, high: int) -> Tensor:
        length = int(torch.randint(low, high + 1, (), generator=draws))
        return words[torch.randint(len(words), (length,), generator=draws)]

    lengths, rollouts, first = (turn // 2, turn + turn // 2), [list[Tensor]()], text(prompt, prompt)
    for width in widths:
        copies = width // len(rollouts)
        rollouts = [[*own, text(*lengths), text(*lengths)] for own in rollouts for _ in range(copies)]
    rollouts = [own[:-1] for own in rollouts]  # nothing is observed after the last turn
    masks = [torch.cat([torch.full((len(part),), 1 - i % 2) for i, part in enumerate(own)]) for own in rollouts]
    rows = Rows([first] * len(rollouts), [torch.cat(own) for own in rollouts])
    return Work(model, rows, masks, torch.tensor(tokenizer()("12")["input_ids"]), widths)


# Contenders


def packed_loss(work: Work, weights: list[Tensor] | None = None) -> Tensor:
    columns = {**work.columns, "weights": weights}
    return packed_policy_loss(work.causal, work.rows, **columns, **work.options, token_budget=WHOLE).loss


def ours(work: Work) -> None:
    with work.forward():
        loss = packed_loss(work)
    loss.backward()


def credited(work: Work, config: CounterfactualConfig) -> None:
    columns = {**work.columns, "targets": [work.gold] * len(work.rows), "credit": config}
    with work.forward():
        result = credited_loss(work.causal, tokenizer(), work.rows, **columns, **work.options, token_budget=WHOLE)
    work.weights = result.credit.weights
    result.loss.backward()


def _loss(work: Work, hidden: Tensor, targets: Tensor, advantages: Tensor) -> Tensor:
    """The loss of tokens (R,) from the hidden states (R, H) that predict them: the head that ours runs."""
    columns = [x.to(work.device)[None] for x in (targets, advantages, torch.ones_like(targets).bool())]
    head = work.causal.get_output_embeddings().weight
    return linear_policy_loss(hidden[None], head, columns[0], None, *columns[1:], **work.options)[0]


def varlen(work: Work) -> None:
    """Rows end to end, each with all that it begins with."""
    whole = [torch.from_numpy(work.rows.whole(b))[:-1] for b in range(len(work.rows))]
    for part in groups_within([*map(len, whole)], default_token_budget(work.causal, training=True)):
        own = [work.masks[b].nonzero()[:, 0] for b in part]
        targets = torch.cat([work.rows.completions[b][places] for b, places in zip(part, own, strict=True)])
        advantages = work.advantages[list(part)].repeat_interleave(torch.tensor([*map(len, own)]))
        places = [(len(work.rows.prompts[b]) - 1 + rows).to(work.device) for b, rows in zip(part, own, strict=True)]
        with work.forward():
            states = varlen_states(work.causal, [whole[b] for b in part])
            hidden = torch.cat([one[rows] for one, rows in zip(states, places, strict=True)])
            loss = _loss(work, hidden, targets, advantages)
        loss.backward()


def trl_tree(work: Work) -> None:
    """TRL's `TreeRow` and its attention to gathered keys, over PyTorch's kernels in place of FlashAttention 3's."""
    try:
        from trl.experimental.async_grpo import packing
    except ImportError as error:
        raise Absent(f"TRL has no experimental tree here: {error}") from error
    tree, config = packing.TreeRow(), work.causal.config
    for b, mask in enumerate(work.masks):
        ids, others = torch.from_numpy(work.rows.whole(b)), {"advantage": float(work.advantages[b]), "group_id": 0}
        own = torch.cat([mask.new_zeros(len(work.rows.prompts[b])), mask])
        tree.add({"input_ids": ids, "completion_mask": own, "old_log_probs": torch.zeros(len(ids)), **others})
    pack = {name: tensor.to(work.device) for name, tensor in tree.pack().items()}
    longest = dict(zip(("tree_max_seqlen_q", "tree_max_seqlen_k"), pack["tree_max_seqlens"].tolist(), strict=True))
    options = {name: pack[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")} | longest
    width = 2 * config.num_key_value_heads * head_dim(config) * config.num_hidden_layers * work.dtype.itemsize
    if work.counts:
        work.facts["copied_bytes"] = len(pack["tree_kv_index"]) * width
    packing.register_tree_attention()
    index, kernels = pack["token_index"], SimpleNamespace(flash_attn_varlen_func=_attention)
    attention = using_attention(work.causal, packing.TREE_ATTENTION)
    with work.forward(), attention, mock.patch.object(packing, "_flash_attn", return_value=kernels):
        hidden = row_states(work.causal, pack["input_ids"], pack["position_ids"], **options)[index]
        loss = _loss(work, hidden, pack["shift_labels"][index], pack["advantages"])
    loss.backward()


def _attention(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, key_ends: Tensor, *longest: int, softmax_scale: float, **_: Any
) -> Tensor:
    """The attention of TRL's segments, q (N, H, D), to keys (M, Hkv, D) of which the last are their own."""
    return causal_varlen_attention(q, k, v, (ends, key_ends), (longest[0], longest[1]), scale=softmax_scale)


def edges(mask: Tensor) -> list[int]:
    """List where the turns of a rollout start, and where it ends."""
    return [0, *((mask.diff() == 1).nonzero()[:, 0] + 1).tolist(), len(mask)]


def gains_by_one_forward(work: Work) -> Tensor:
    """IGPO's job: what each turn adds to the probability of the gold answer, not rounded as credit rounds it."""
    rows = Rows(work.rows.prompts, [torch.cat([row, work.gold]) for row in work.rows.completions])
    turns = [list(itertools.starmap(Span, itertools.pairwise(edges(mask)))) for mask in work.masks]
    answers = [Span(length, length + len(work.gold)) for length in work.rows.lengths]
    batch = Batch(rows, units=turns, answers=answers, reasoning_ends=work.rows.lengths, token_budget=WHOLE)
    return torch.stack(CREDIT[GAIN].estimator(InProcess(work.causal), batch).values)


def gains_by_turn(work: Work) -> Tensor:
    """The same by a padded forward of all rollouts up to each turn, with logits of the answer only."""
    return gains_of(work, work.causal, range(len(work.rows)))


@torch.no_grad()
def gains_of(work: Work, model: Any, rows: Sequence[int]) -> Tensor:
    values, gold, ends = [], work.gold.to(work.device), [edges(mask) for mask in work.masks]
    for k in range(len(ends[0])):
        cut = [torch.cat([work.rows.prompts[b], work.rows.completions[b][: ends[b][k]], work.gold[:-1]]) for b in rows]
        ids, mask = (x.to(work.device) for x in padded_ids(cut, side="left"))
        places = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        logits = model(ids, **places, use_cache=False, logits_to_keep=len(gold)).logits
        lines = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        values.append(lines.gather(-1, gold.expand(len(rows), -1)[..., None])[..., 0].mean(1).exp())
    return torch.stack(values, 1).diff(dim=1).cpu()


STEPS: dict[str, Callable[[Work], Tensor | None]] = {
    OURS: ours, TRL: trl_tree, VARLEN: varlen,
    **{name: functools.partial(credited, config=config) for name, config in CREDIT.items()},
}  # fmt: skip
ASKED = {ONE_FORWARD: gains_by_one_forward, EACH_TURN: gains_by_turn}
