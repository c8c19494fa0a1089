"""Packed trees and counterfactual credit in TRL: `PackedGRPOTrainer` in place of `GRPOTrainer`.

TRL generates, rewards and computes advantages; credit of the generation batch (`trl_credit.py`) is multiplied into
them. Then TRL's own loss runs, or the packed one (`trl_losses.py`), which may assign credit from its own forward.
"""

import inspect
import warnings
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from torch import Tensor, nn

from .. import CounterfactualConfig
from ..credit.assign import FIGURES
from ..credit.config import as_config
from ..credit.deferred import BatchKeys, DeferredCredit
from ..credit.nothing import NOT_MIXED, why_nothing
from ..loss.options import LossOptions
from ..model.check.verify import check_supported, check_trainable
from ..model.compile_layers import compile_layers
from ..model.modes import one_mode
from ..model.parts import causal_lm, vocab_size
from ..model.run_inside import is_sharded, run_inside
from ..text.offsets import describe_spare_ids
from . import require
from .credit import refuse
from .trl_credit import KEPT, PADDED, ROW, batch_credit, kept_tokens_of, loss_mask, weighed, why_at_once
from .trl_losses import logprobs_of_packed_rows, loss_of_packed_rows, prompts_together
from .trl_refusals import OLDEST, credit_obstacles, cuts, packing_obstacles
from .vllm_kept import record_kept_ids

_LOG = get_logger(__name__)
TRL = require("trl", OLDEST)

from trl import GRPOTrainer  # noqa: E402  the check of TRL's version says more than a failing import would

if TYPE_CHECKING:
    _Trainer = GRPOTrainer
else:
    _Trainer = object

_CREDIT_FIGURES = FIGURES | {"credit/seconds": "max"}
# The method of a tensor by which the logged figures of the processes combine; others by their mean.
_COMBINE = _CREDIT_FIGURES | {
    "packed/tokens_fed": "sum",
    "packed/tokens_padded": "sum",
    "clip_ratio/low_min": "min",
    "clip_ratio/high_max": "max",
    "sampling/sampling_logp_difference/max": "max",
    "sampling/importance_sampling_ratio/min": "min",
    "sampling/importance_sampling_ratio/max": "max",
}

_OF_SAMPLING = ("sampling/sampling_logp_difference", "sampling/importance_sampling_ratio")

_LOGPROBS = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies)


class CounterfactualMixin(_Trainer):
    """Add packed trees and credit to `GRPOTrainer` or a subclass: `class Mine(CounterfactualMixin, TheirTrainer)`.

    Args:
        *args, **kwargs: the trainer's own.
        credit: credit of tokens: a `CounterfactualConfig` or the name of a preset; None for none.
        packed_loss: compute TRL's loss from one packed forward of each micro-batch, which feeds equal prompts once
            and no padding, with or without credit. The rows of an optimizer step are sorted by prompt (not for `bnpo`,
            whose micro-batches are its denominators). False, without credit, is TRL's trainer to the bit.
        log_entropy: False leaves TRL's `entropy` out of the metrics of the packed loss, unless the loss reads it;
            completions without an advantage are then not fed, if there is no KL term.

    With `packed_loss=True` a `rollout_func` may also return `sampling_mask`: for each completion a `KeptTokens`, or for
    each of its tokens the list of ids that the sampler kept (empty for a tool's). The loss is normalised over them.

    Raises:
        NotImplementedError: settings or a model that cannot be combined with credit or the packed loss, each named; the
            model is checked before the first completion is generated.
    """

    args: Any
    model: Any
    _sampling_mask: Any = None  # of the rollouts that are being made
    _kept: Any = None  # ids that the sampler kept, of the rows whose loss TRL computes
    _fed = 0  # tokens of the last packed forward for log-probs

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise `TypeError` where the trainer comes before the mixin, whose methods would then never run."""
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if GRPOTrainer in order[: order.index(CounterfactualMixin)]:
            first = f"class {cls.__name__}(CounterfactualMixin, TheTrainer)"
            raise TypeError(f"{cls.__name__}: the trainer hides the mixin's methods; write {first}")

    def __init__(
        self,
        *args: Any,
        credit: CounterfactualConfig | str | None = None,
        packed_loss: bool = True,
        log_entropy: bool = True,
        **kwargs: Any,
    ) -> None:
        if not log_entropy and not packed_loss:
            raise ValueError("log_entropy=False needs packed_loss=True; TRL's loss logs it always")
        self.credit = as_config(credit)
        super().__init__(*args, **kwargs)
        self.packed_loss, self.log_entropy = packed_loss, log_entropy
        self._temperature = self.temperature  # TRL's models and sampling keep it, whatever the attribute is later
        self._keys = BatchKeys(self.args.seed)
        if self.credit.control != "off":
            if spare := describe_spare_ids(vocab_size(causal_lm(self.model)), _tokenizer_of(self)):
                _LOG.warning(spare)
            refuse(credit_obstacles(self))
        if packed_loss:
            refuse(packing_obstacles(self), "packed_loss=True")
        # The packed loss corrects for vLLM's log-probs itself; TRL would feed the completions once more for it.
        self._corrects = (
            packed_loss and not self._loss_is_trls and getattr(self, "vllm_importance_sampling_correction", False)
        )
        if self._corrects:
            self.vllm_importance_sampling_correction = False
        rolls_out = getattr(self, "rollout_func", None) is not None
        if packed_loss and getattr(self, "vllm_generation", None) is not None and cuts(self.args) and not rolls_out:
            record_kept_ids(self)
        self._model_is_checked, self._warned = False, set[str]()
        self._deferred: DeferredCredit | None = None
        if packed_loss and rolls_out:
            self.rollout_func = partial(self._without_mask, self.rollout_func)

    def _check_model(self) -> None:
        def check(causal: Any) -> None:
            if self._feeds_for_credit:
                check_supported(causal)
            if self.packed_loss:
                with one_mode(causal, training=True):
                    check_trainable(causal, router_loss=self.aux_loss_enabled)

        model = self._queried_model
        with self.accelerator.autocast():
            try:
                run_inside(model, partial(check, causal_lm(model)))
            except NotImplementedError as error:
                raise NotImplementedError(f"{error}; credit=None, packed_loss=False leave it to TRL") from error
            if self.packed_loss and self.args.torch_compile:
                try:
                    compile_layers(self.accelerator.unwrap_model(self.model), backend=self.args.torch_compile_backend)
                except NotImplementedError as error:
                    _LOG.warning(f"torch_compile=True: packed forwards run as they are: {error}")
        self._model_is_checked = True

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self._model_is_checked:
            self._check_model()
        output = super()._generate_and_score_completions(inputs)
        if self._sampling_mask is not None:
            self._replay(output)
        credited = self.model.training and self.credit.control != "off"
        if "pixel_values" in output and (credited or self.packed_loss):
            refuse(["images (pixel_values)"], "packed_loss=True" if self.packed_loss else "counterfactual credit")
        if not credited:
            if self.credit.control != "off":  # the table is filled in evaluation too
                self._log_weighed([None] * len(output["completion_ids"]))
            return output
        count = len(output["advantages"])
        batch = batch_credit(
            self.credit, _tokenizer_of(self), output, self._own_rewards(count), self._sampled,
            first=self.accelerator.process_index * count, group_size=self.num_generations,  # type: ignore[arg-type]
            seed=self._keys.key(self.state.global_step), temperature=self._temperature,
            gather=None if self.accelerator.num_processes == 1 else lambda value: gather_object([value]),
        )  # fmt: skip
        if self._is_deferred(batch):
            self._deferred = batch
            output[ROW] = torch.arange(count, device=output["advantages"].device)
            return output
        with self.accelerator.autocast():
            batch.by_model(self._queried_model)
        credited = batch.credited(range(count))
        if not isinstance(credited, Tensor):  # padding keeps the completion's own advantage
            own = output["advantages"].cpu().view(count, -1).expand(output["completion_ids"].shape).clone()
            for row, values in zip(own, credited, strict=True):
                row[: len(values)] = values
            credited = own * output["tool_mask"].cpu() if "tool_mask" in output else own
        output["advantages"] = credited.to(output["advantages"].device)
        self._report(batch)
        return output

    def _without_mask(self, rollout_func: Any, prompts: Any, trainer: Any) -> dict[str, Any]:
        """Take the sampler's kept ids out of a rollout function's output, which TRL would hand to reward functions."""
        output = dict(rollout_func(prompts, trainer))
        self._sampling_mask = output.pop("sampling_mask", None)
        return output

    def _replay(self, output: dict[str, Any]) -> None:
        """Put the kept ids into the loss's inputs, and normalise the log-probs that TRL computed over them."""
        masks, self._sampling_mask = self._sampling_mask, None
        if output.get("ref_per_token_logps") is not None:
            refuse([f"beta={self.beta}: log-probs of the reference are over the whole vocabulary"], "sampling_mask")
        output[KEPT] = kept_tokens_of(masks, self._sampled, loss_mask(output))
        if output.get("old_per_token_logps") is None:
            return
        with torch.no_grad():
            old = self._packed(self.model, output, output[KEPT], entropies=False, routers=False)
        output["old_per_token_logps"] = old[0]

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        asked = _LOGPROBS.bind(self, model, *args, **kwargs).arguments
        if not self.packed_loss or asked.get("pixel_values") is not None:
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        parts = [asked["input_ids"], asked["attention_mask"]]
        start = parts[0].shape[1] - asked["logits_to_keep"]
        values = [half for part in parts for half in (part[:, :start], part[:, start:])]
        inputs = dict(zip(("prompt_ids", "completion_ids", "prompt_mask", "completion_mask"), values, strict=True))
        columns = self._packed(
            model, inputs, self._kept, entropies=asked.get("compute_entropy", False),
            routers=asked.get("compute_aux_loss", False),
        )  # fmt: skip
        return tuple(columns[: 2 + ("compute_aux_loss" in _LOGPROBS.parameters)])

    def _packed(self, model: Any, inputs: dict[str, Any], kept: Any, **wanted: bool) -> list[Tensor | None]:
        """Compute log-probs of TRL's padded rows, and what else is wanted, from one packed forward."""
        body = partial(
            logprobs_of_packed_rows, causal_lm(model), inputs={name: inputs[name] for name in PADDED}, kept=kept,
            temperature=self._temperature, head_in_float32=self._head_in_float32, **wanted,
        )  # fmt: skip
        columns, self._fed = self._run(model, body)
        return columns

    def _run(self, model: Any, body: Any) -> Any:
        """Run `body` on the policy or the reference, inside the module that gathers its weights."""
        if model is not getattr(self, "ref_model", None) and is_sharded(self.model_wrapped):
            model = self.model_wrapped
        with self.accelerator.autocast():  # around TRL's own forward, too
            return run_inside(
                model, body, trains=True, check=partial(check_trainable, router_loss=self.aux_loss_enabled)
            )

    @property
    def _head_in_float32(self) -> bool:
        return bool(getattr(self.args, "cast_lm_head_to_fp32", False))

    @property
    def _loss_is_trls(self) -> bool:
        """Whether the loss reads entropies, so that TRL's own runs, on log-probs of a packed forward."""
        return self.top_entropy_quantile < 1 or self.use_adaptive_entropy or self.entropy_coef != 0  # type: ignore[no-any-return]

    @property
    def _feeds_for_credit(self) -> bool:
        return self.credit.asks_model or self.credit.reads_entropies

    def _is_deferred(self, batch: DeferredCredit) -> bool:
        """Whether credit is assigned from the training forwards; says once why not, where that would save work."""
        if not self.packed_loss or not self._feeds_for_credit:
            return False
        micro_batches = self.args.steps_per_generation
        one_update = self.args.gradient_accumulation_steps % (micro_batches * self.num_iterations) == 0
        reason = "the loss reads entropies" if self._loss_is_trls else why_at_once(batch, micro_batches, one_update)
        if reason is not None and "a separate forward" not in self._warned:
            self._warned.add("a separate forward")
            _LOG.warning(f"packed_loss=True: credit takes a separate forward before the update: {reason}")
        return reason is None

    def _report(self, batch: DeferredCredit) -> None:
        credit = batch.finished()
        if credit is None:
            return
        figures = credit.metrics(batch.batch.mask) | {"credit/seconds": batch.seconds}
        self._log_gathered({name: figures.get(name, float("nan")) for name in _CREDIT_FIGURES}, "train")
        # Before 1.16 TRL knew the tokenizer's own end only.
        ends = {batch.tokenizer.pad_token_id, *getattr(self, "eos_token_ids", [batch.tokenizer.eos_token_id])}
        truncated = [len(row) > 0 and int(row[-1]) not in ends for row in batch.batch.rows.completions]
        problem = why_nothing(batch, credit, truncated)
        if problem not in (None, NOT_MIXED) and problem.what not in self._warned:  # TRL logs frac_reward_zero_std
            self._warned.add(problem.what)
            warnings.warn(problem.sentence, stacklevel=2)
        if self.log_completions:
            self._log_weighed(weighed(batch, credit))

    def _log_weighed(self, texts: Sequence[str | None]) -> None:
        if self.log_completions and "extra" in self._logs:
            self._logs["extra"]["weighed"].extend(gather_object(list(texts)))  # type: ignore[index]

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        self._sampled = completion_ids_list
        self._rewards_by_function = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self._rewards_by_function

    def _own_rewards(self, rows: int) -> Tensor:
        columns, count = self._rewards_by_function, rows * self.accelerator.num_processes
        if len(columns) != count:
            raise ValueError(
                f"rewards: {len(columns)} completions were rewarded and {count} are trained on; credit cannot tell "
                f"which, so {type(self).__name__} must keep every completion"
            )
        rewards = (columns * self.reward_weights.to(columns.device)).nansum(1)
        rewards = rewards.masked_fill(columns.isnan().all(1), float("nan"))
        first = self.accelerator.process_index * rows
        return rewards[first : first + rows]

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if not self.packed_loss:
            return super()._prepare_inputs(generation_batch)
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        buffered = self._buffered_inputs
        window, most = sorted((self.args.steps_per_generation, self.args.gradient_accumulation_steps))
        # TRL has shuffled the rows of the batch. Gradients of one optimizer step are summed, so within a step the
        # rows may be in any order, unless a term belongs to a micro-batch as a whole, or steps and batches overlap.
        as_a_whole = self.loss_type == "bnpo" or self._loss_is_trls or self.aux_loss_enabled
        if not self.model.training or buffered is before or as_a_whole or most % window:
            return inputs
        self._buffered_inputs = []
        for start in range(0, len(buffered), window):
            self._buffered_inputs += prompts_together(buffered[start : start + window])
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    @property
    def _queried_model(self) -> Any:
        """Return the model that credit queries, with its wrapper if that shards it."""
        return self.model_wrapped if is_sharded(self.model_wrapped) else self.accelerator.unwrap_model(self.model)

    def _log_gathered(self, figures: dict[str, Any], mode: str, tokens: int = 1) -> None:
        """Append figures to TRL's metrics, combined over the processes; means over tokens count `tokens` times."""
        device, by_token = self.accelerator.device, ["kl", "entropy"]
        if self.importance_sampling_level == "token":
            by_token += ["cispo_clip_ratio", *(f"clip_ratio/{part}_mean" for part in ("low", "high", "region"))]
        values = [*figures.values(), *(tokens if name in by_token else 1 for name in figures)]
        local = torch.stack([torch.as_tensor(v, dtype=torch.float32, device=device) for v in values])
        gathered = self.accelerator.gather(local).view(-1, 2, len(figures)).cpu()
        for name, (column, many) in zip(figures, gathered.permute(2, 1, 0), strict=True):
            known, many = column[~column.isnan()], many[~column.isnan()]
            if len(known):
                how = _COMBINE.get(name)
                mean = (known * many).sum() / many.sum().clamp(min=1)
                self._metrics[mode][name].append((mean if how is None else getattr(known, how)()).item())

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        if not self.packed_loss:
            return super()._compute_loss(model, inputs)
        mode = "train" if self.model.training else "eval"
        if self._loss_is_trls:
            self._kept = inputs.get(KEPT)
            loss = super()._compute_loss(model, inputs)
            self._kept, padded = None, inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()
            self._log_gathered({"packed/tokens_fed": self._fed, "packed/tokens_padded": padded}, mode)
            return loss
        accumulation = self.current_gradient_accumulation_steps if mode == "train" else 1
        normalizer: Tensor | float = accumulation
        # Over the generation batch, where other terms are over this micro-batch.
        if self.loss_type in ("dapo", "cispo", "vespo"):
            normalizer = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
            if mode == "train":
                normalizer = normalizer * accumulation / self.args.steps_per_generation
        credit = self._deferred if ROW in inputs else None
        body = partial(
            loss_of_packed_rows, causal_lm(model), inputs=inputs, options=self._loss_options(inputs), credit=credit,
            router_coef=self.router_aux_loss_coef if self.aux_loss_enabled else None, scale=normalizer / accumulation,
            head_in_float32=self._head_in_float32,
        )  # fmt: skip
        loss, metrics = self._run(model, body)
        if credit is not None:
            self._report(credit)
        # TRL compares the sampler with the policy of the generation; a later pass is of another policy.
        first = self._step % (self.args.steps_per_generation * self.num_iterations) < self.args.steps_per_generation
        unlogged = () if self._corrects and (first or mode == "eval") else _OF_SAMPLING
        tokens = metrics.pop("tokens")
        self._log_gathered(
            {n: value for n, value in metrics.items() if n != "ratio_mean" and not n.startswith(unlogged)}, mode, tokens
        )
        return loss / normalizer

    def _loss_options(self, inputs: dict[str, Any]) -> dict[str, Any]:
        ratio = inputs.get("importance_sampling_ratio")
        names = LossOptions.__annotations__.keys() & vars(self.args).keys()  # TRL's names
        options = {name: getattr(self, name, getattr(self.args, name)) for name in names} | {
            "targets": inputs["completion_ids"],
            "old_logprobs": inputs.get("old_per_token_logps"),
            "advantages": inputs["advantages"],
            "mask": loss_mask(inputs),
            "weights": None if ratio is None else ratio.expand_as(inputs["completion_ids"]),
            "ref_logprobs": inputs.get("ref_per_token_logps"),
            "epsilon": self.epsilon_low,
            "temperature": self._temperature,
            "compute_entropy": self.log_entropy,
            "num_items_in_batch": 1.0,
        }
        sampled, name = inputs.get("sampling_per_token_logps"), "off_policy_mask_threshold"
        threshold = getattr(self, name, getattr(self.args, name))
        bounds = ("mode", "clip_min", "clip_max") if self.use_vllm and self._corrects and sampled is not None else ()
        options |= {f"sampling_{bound}": getattr(self, f"vllm_importance_sampling_{bound}") for bound in bounds}
        if sampled is None:  # a policy drifts from the one that sampled only by its own updates
            sampled = inputs.get("old_per_token_logps")
        options["off_policy_mask_threshold"] = None if sampled is None else threshold
        options["sampling_logprobs"] = sampled if bounds or threshold is not None else None
        return options


class PackedGRPOTrainer(CounterfactualMixin, GRPOTrainer):
    """TRL's `GRPOTrainer` on packed trees, with the same losses and gradients; `credit=` adds credit."""


def _tokenizer_of(trainer: Any) -> Any:
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
