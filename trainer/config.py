"""Check the settings of a run against each other and the library, and turn them into what its parts take."""

from dataclasses import dataclass
from typing import Any

from cfa_kernels import CounterfactualConfig
from cfa_kernels.credit.config import as_config
from cfa_kernels.credit.presets import NONE
from cfa_kernels.estimators.base import EXTERNAL, LOG_RATIOS, NEEDS, TARGETS
from cfa_kernels.integrations.credit import unmet_needs
from cfa_kernels.loss.centering import check_joins
from cfa_kernels.loss.options import NUMBERS, LossOptions
from cfa_kernels.loss.types import weights_sequences
from cfa_kernels.options import check_fields
from cfa_kernels.scoring.access import GRADIENTS, WHOLE

from .precision import Precision
from .rewards.built_in import BUILT_IN
from .settings import TrainSettings


@dataclass
class TrainConfig(TrainSettings):
    """Settings of one run of counterfactual DAPO, checked."""

    def __post_init__(self) -> None:
        check_fields(self)
        try:
            self.precision  # noqa: B018
        except RuntimeError as problem:
            raise ValueError(f"device must be auto, cpu or a GPU such as cuda:0, got {self.device!r}") from problem
        self.refuse()
        options = self.loss_options
        is_centered = options.pop("score_centering")
        joins_tokens = LossOptions(**options).joins_tokens
        if is_centered:
            check_joins(joins_tokens)

    def refuse(self, processes: int = 1) -> None:
        """Raise `ValueError` with the first sentence below that holds for so many processes."""
        cases = _of_processes(self, processes) if processes > 1 else _contradictions(self)
        for sentence in (sentence for sentence, holds in cases.items() if holds):
            raise ValueError(sentence)

    @property
    def grader(self) -> str:
        """Name of the reward function that evaluation counts by."""
        return self.eval_reward or next((name for name in self.reward_funcs if name in BUILT_IN), "exact_match")

    @property
    def kind(self) -> str:
        """Kind of the rows: the one that the grader reads."""
        return BUILT_IN[self.grader].kinds[0] if self.grader in BUILT_IN else "text"

    @property
    def precision(self) -> Precision:
        """Return the arithmetic that `dtype`, `device` and `use_peft` choose."""
        return Precision.of(self.dtype, self.device, adapters=self.use_peft)

    def counterfactual(self) -> CounterfactualConfig:
        """Build the library's configuration of credit."""
        return as_config({"preset": self.credit, **self.credit_options, "token_budget": self.token_budget})

    @property
    def credit_name(self) -> str:
        """Name the run's credit, as logs and pages have it: the estimator with its control, or none."""
        credit = self.counterfactual()
        return NONE if credit.control == "off" else ", ".join(filter(None, [credit.estimator.name, credit.control]))

    @property
    def loss_options(self) -> dict[str, Any]:
        """Return the options of the policy loss, by the names it takes."""
        names = (*NUMBERS, "loss_type", "importance_sampling_level", "max_completion_length", "score_centering")
        options = {name: getattr(self, name) for name in names if hasattr(self, name)}
        if (high := self.importance_sampling_clip_max) is not None:
            options |= {"sampling_mode": self.importance_sampling_mode, "sampling_clip_max": high}
        return options


def _contradictions(c: TrainConfig) -> dict[str, bool]:
    """Say what would train something else than was asked for, and whether these settings do."""
    credit, high, url = c.counterfactual(), c.importance_sampling_clip_max, c.vllm_server_base_url
    vllm, merges = c.rollout_engine == "vllm", getattr(credit.estimator, "merge_adapters", False)
    corrects = high is not None and c.importance_sampling_mode.startswith("token")
    weighs = credit.control != "off" or c.shaping_func is not None or corrects
    unfit = [name for name in c.reward_funcs if name in BUILT_IN and c.kind not in BUILT_IN[name].kinds]
    names, factors = len(c.reward_funcs), len(c.reward_weights)
    return {
        "stop: an empty text would end every completion at once; omit it": "" in (c.stop or []),
        f"reward_weights must be finite numbers, got {c.reward_weights}": any(x - x != 0 for x in c.reward_weights),
        "loss_type: bnpo divides by the tokens of a part that memory cuts; take dapo or grpo": c.loss_type == "bnpo",
        f"generation_batch_size must be a multiple of num_generations, got {c.generation_batch_size} and "
        f"{c.num_generations}": c.generation_batch_size % c.num_generations > 0,
        "importance_sampling_mode has no effect without importance_sampling_clip_max; set it, or drop the mode": (
            c.importance_sampling_mode != "token_truncate" and high is None
        ),
        **dict.fromkeys(unmet_needs(credit, NEEDS.keys() - {EXTERNAL, LOG_RATIOS, TARGETS}), True),
        "importance_sampling_level=sequence sums the weights of tokens by credit, shaping_func or "
        "importance_sampling_clip_max; take sequence_token": (
            weighs and weights_sequences(c.loss_type, c.importance_sampling_level)
        ),
        "dtype: bfloat16 without use_peft would train weights to which most steps are lost by rounding; take mixed": (
            c.dtype == "bfloat16" and not c.use_peft
        ),
        "vllm_server_base_url and vllm_weights: only rollout_engine=vllm reads them; name it, or neither": (
            not vllm and (url != TrainSettings.vllm_server_base_url or c.vllm_weights != "auto")
        ),
        "vllm_weights: adapter sends a LoRA, and use_peft is off": c.vllm_weights == "adapter" and not c.use_peft,
        f"vllm_server_base_url must begin with http:// or https://, got {url!r}": (
            not url.startswith(("http://", "https://"))
        ),
        "estimator.merge_adapters: there is no adapter to merge, as use_peft is off": merges and not c.use_peft,
        f"temperature: a vLLM server takes at most 2, got {c.temperature}": vllm and c.temperature > 2,
        "score_centering needs the ids of a nucleus: take a top_p below 1": c.score_centering and c.top_p == 1,
        "reward_funcs must name at least one function, got none": not c.reward_funcs,
        f"reward_weights: {factors} weights for {names} reward_funcs; give one for each": factors not in (0, names),
        f"reward_funcs: {', '.join(unfit)} cannot read the rows of eval_reward {c.grader}, {c.kind}": bool(unfit),
    }


def _of_processes(c: TrainConfig, processes: int) -> dict[str, bool]:
    needs, device, in_pieces = c.counterfactual().needs, c.precision.device, c.parallel == "fsdp2"
    return {
        f"generation_batch_size: {processes} processes cannot share its problems equally; use a multiple": (
            c.generation_batch_size // c.num_generations % processes > 0
        ),
        f"eval_problems={c.eval_problems}: with a vLLM server each of {processes} processes needs one or more": (
            c.rollout_engine == "vllm" and c.eval_problems is not None and c.eval_problems < processes
        ),
        f"shaping_func: runs in one process, and there are {processes}": c.shaping_func is not None,
        f"device: {device} is one GPU, and there are {processes} processes; omit it or say cuda": (
            device.type == "cuda" and device.index is not None
        ),
        "estimator: it takes gradients or merges adapters, for which a process must hold the whole model; take "
        "parallel=ddp": in_pieces and not needs.isdisjoint({GRADIENTS, WHOLE}),
    }
