"""Run a training step on tensors without memory, and count it: update, credit, decoding."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PretrainedConfig, StaticCache

from benchmarks.explain.batch import Described
from benchmarks.explain.stand_ins import as_on_gpu
from benchmarks.explain.tally import SAMPLER, Counts, Tally
from benchmarks.harness.workloads import MODELS
from cfa_kernels.hf.liger import fused_modules
from cfa_kernels.hf.model import causal_lm
from cfa_kernels.hf.verify import check_trainable
from cfa_kernels.losses.ragged import LossBatch
from cfa_kernels.scoring.plan import ScoringOptions
from cfa_kernels.scoring.training_forward import packed_forward
from trainer.rollouts.sampling import FiniteScores, KeyedSampler

META = torch.device("meta")
PREFILL, DECODE, FORWARD, LOSS, BACKWARD, CREDIT = "prefill", "decode", "forward", "loss", "backward", "credit"


@dataclass(frozen=True)
class Training:
    """What trains: adapters of a rank on some modules in float32, or with rank 0 all weights."""

    rank: int = 32
    targets: tuple[str, ...] = ("all-linear",)

    @property
    def words(self) -> str:
        return f"LoRA r = {self.rank} on {', '.join(self.targets)}" if self.rank else "full training"


def configuration(model: str) -> PretrainedConfig:
    """A preset's configuration by its name, or that of a `config.json` or the folder it is in.

    Raises:
        ValueError: neither a preset nor a file.
    """
    if model in MODELS:
        return copy.deepcopy(MODELS[model])
    try:
        return AutoConfig.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model must be one of {', '.join(MODELS)}, or a config.json; got {model!r} ({error})"
        ) from error


def policy_on_meta(config: PretrainedConfig, training: Training, *, float32: bool = False) -> nn.Module:
    """A policy without memory, in training mode; its weights in bfloat16 or float32, adapters in float32 always.

    Raises:
        NotImplementedError: adapters on the weights of experts.
    """
    with META:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if float32 else torch.bfloat16)
        if training.rank:
            targets = "all-linear" if training.targets == ("all-linear",) else list(training.targets)
            lora = LoraConfig(r=training.rank, lora_alpha=training.rank, target_modules=targets)
            policy = get_peft_model(model, lora).train()
            if any(isinstance(module, ParamWrapper) for module in policy.modules()):
                raise NotImplementedError(
                    "adapters on experts' weights add to whole weights, which is not counted; name other modules by "
                    "--targets, such as q_proj k_proj v_proj o_proj"
                )
            return policy
    return model.train()


def count_update(
    policy: nn.Module, batch: Described, memory: float, *, fused: bool, most: int | None = None
) -> tuple[Counts, dict[str, int]]:
    """Count forward, loss, backward and the scores of masked spans; and what they feed, as they report it.

    Args:
        policy: on torch's `meta` device.
        batch: what is trained on.
        memory: of the GPU, bytes, which says how many rows a forward with gradients takes.
        fused: whether adapters run as one operator, or as PEFT's own layers.
        most: rows of a forward with gradients instead.
    """
    tally, causal = Tally(), causal_lm(policy)
    rows = dict.fromkeys(("packs", "tree", "branches", "branch_packs", "loss"), 0)
    with _counting(tally, policy, fused=fused):
        check_trainable(causal)  # once per model, before its first step
        tally.counts = Counts()
        for micro in batch.micro_batches(policy, memory, most):
            _micro_batch(tally, causal, micro, batch, rows)
    return tally.counts, rows


def _micro_batch(tally: Tally, causal: Any, micro: Any, batch: Described, rows: dict[str, int]) -> None:
    """What the trainer does with a micro-batch (`trainer.step`), counted into `tally` and `rows`."""
    with tally.within(FORWARD):
        forward = packed_forward(causal, micro.prompts, micro.completions, token_budget=1 << 20, keep_states=True)
    with tally.within(CREDIT):
        work = forward.score_batch(batch.scored(micro, causal), ScoringOptions()).work
    with tally.within(LOSS):
        weights = [torch.ones(len(completion)) for completion in micro.completions]
        wanted = LossBatch.of(micro.completions, None, micro.advantages, weights=weights, mask=micro.mask,
                              compute_entropy=True)  # fmt: skip
        options = {"compute_entropy": True, "validate": False, "loss_type": "dapo", "num_items_in_batch": micro.tokens}
        loss = forward.policy_loss(wanted, 0.6, **options).loss
    with tally.within(BACKWARD):
        loss.backward()
    causal.zero_grad(set_to_none=True)
    rows["packs"] += len(forward.fed)
    rows["tree"] += forward.tokens_fed
    rows["branches"] += work.tokens_fed
    rows["branch_packs"] += work.forwards
    rows["loss"] += len(wanted.rows)


def count_decoding(policy: nn.Module, batch: Described, *, merged: bool) -> Counts:
    """Count the prompts' forward and one decoded token of each completion, half way, with the sampler.

    `merged`: adapters in the weights and a cache of its final size, as a CUDA graph runs it; else adapters apart and a
    cache that grows.
    """
    tally, causal = Tally(), causal_lm(policy)
    rows, prompt = len(batch.prompts), max(map(len, batch.prompts))
    size = prompt + batch.positions
    past = prompt + batch.positions // 2
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_merged(policy) if merged else ExitStack())
        stack.enter_context(_counting(tally, policy, fused=False))
        stack.enter_context(fused_modules(causal))
        policy.eval()
        cache: Any = (
            StaticCache(config=causal.config, max_cache_len=size) if merged else DynamicCache(config=causal.config)
        )
        with tally.within(PREFILL):
            _feed(causal, cache, rows, prompt, seen=size if merged else prompt)
        if not merged:
            _grow(cache, past - 1)
        # `generate` changes how experts run while it decodes.
        with causal._optimize_model_for_decode(), tally.within(DECODE):
            scores = _feed(causal, cache, rows, 1, seen=size if merged else past)
        with tally.within(DECODE, SAMPLER):
            ids = torch.empty(rows, past, dtype=torch.long, device=META)
            sampler = KeyedSampler(torch.empty(rows, 1, dtype=torch.float64, device=META), 0.6, 0.95)
            sampler(ids, FiniteScores()(ids, scores.float()))
    policy.train()
    return tally.counts


def _feed(causal: Any, cache: Any, rows: int, length: int, seen: int) -> Tensor:
    """Logits (rows, V) after `length` more tokens, which see `seen` places of the cache."""
    ids = torch.empty(rows, length, dtype=torch.long, device=META)
    mask = torch.empty(rows, 1, length, seen, dtype=torch.bool, device=META)
    positions = torch.empty(rows, length, dtype=torch.long, device=META)
    return causal(
        input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]  # fmt: skip


def _grow(cache: Any, length: int) -> None:
    """Let every layer of a cache hold `length` tokens."""
    for layer in cache.layers:
        for name in ("keys", "values"):
            held = getattr(layer, name)
            setattr(layer, name, held.new_empty(*held.shape[:2], length, held.shape[3]))


@contextmanager
def _merged(policy: nn.Module) -> Iterator[None]:
    """Within it adapters count as merged: layers run their base weights only."""
    disable = getattr(policy, "disable_adapter", None)
    with disable() if disable else ExitStack():
        yield


@contextmanager
def _counting(tally: Tally, policy: nn.Module, *, fused: bool) -> Iterator[None]:
    with ExitStack() as stack:
        for context in (as_on_gpu(tally, fused=fused), tally.watch(policy), tally):
            stack.enter_context(context)
        yield
