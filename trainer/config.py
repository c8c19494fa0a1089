"""Check the settings of a run against each other and the library, and turn them into what its parts take."""

import os
import re
from dataclasses import dataclass, fields
from typing import Any

import torch

from cfa_kernels import AnswerRules, CounterfactualConfig
from cfa_kernels.credit.weights import Control
from cfa_kernels.estimators.base import EXTERNAL, LOG_RATIOS, NEEDS, TARGETS
from cfa_kernels.integrations.credit import unmet_needs
from cfa_kernels.loss.centering import check_joins
from cfa_kernels.loss.checks import by_sequence, check_correction, check_level, weights_sequences
from cfa_kernels.loss.token_loss import NUMBERS
from cfa_kernels.model.limits import smallest_budget
from cfa_kernels.options import Interval, check_fields, imported
from cfa_kernels.scoring.access import GRADIENTS, WHOLE

from .precision import Precision
from .rewards.built_in import BUILT_IN
from .settings import GENERATED, TrainSettings

_CONTROLS: dict[str, Control | None] = {
    "counterfactual": None, "inverted": "inverted", "permuted": "permuted", "random": "random", "uniform": "off",
}  # fmt: skip
_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # no pattern for an answer: it has no group


@dataclass
class TrainConfig(TrainSettings):
    """Settings of one run of counterfactual DAPO, checked. Defaults are the CF paper's where it states one."""

    def __post_init__(self) -> None:
        check_fields(self)
        try:
            self.precision  # noqa: B018
        except RuntimeError as problem:
            raise ValueError(f"device must be auto, cpu or a GPU such as cuda:0, got {self.device!r}") from problem
        check_level(vars(self))
        self.refuse()
        if (high := self.importance_sampling_clip_max) is not None:
            correction = {"sampling_mode": self.importance_sampling_mode, "sampling_clip_max": high}
            check_correction(correction | {"sampling_logprobs": ...}, self.loss_type, self.importance_sampling_level)
        if self.score_centering:
            corrects = {"sampling_mode": self.importance_sampling_mode if high is not None else None}
            check_joins(self.importance_sampling_level != "token" or by_sequence(self.loss_options | corrects))

    def refuse(self, processes: int = 1) -> None:
        """Raise `ValueError` with the first sentence of the tables below that holds for so many processes."""
        for sentence, holds in (_of_processes(self, processes) if processes > 1 else _contradictions(self)).items():
            if holds:
                raise ValueError(sentence)

    @property
    def grader(self) -> str:
        """Name of the reward function that evaluation counts by."""
        graders = (name for name in self.reward_funcs if name in BUILT_IN and BUILT_IN[name].grades)
        return self.eval_reward or next(graders, "exact_match")

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
        own: Any = self.credit_options.get("token_budget")
        budget = smallest_budget(self.token_budget, own)
        options = {"estimator": self.estimator, "control": _CONTROLS[self.credit], "token_budget": budget}
        return CounterfactualConfig.from_flat({**self.credit_options, **options, **self.answer_options()})

    def answer_options(self) -> dict[str, Any]:
        """Return the run's own form of answers, by the names of `AnswerRules`."""
        form: Any = self.answer_format  # a pattern as it stands
        if form is not None and _REFERENCE.fullmatch(form):
            form = imported("answer_format", form)
        names = [entry.name for entry in fields(AnswerRules) if entry.name in self.credit_options]
        return {"answer_format": form, **{name: self.credit_options[name] for name in names}}

    @property
    def own_credit(self) -> dict[str, str]:
        """Name the functions and classes of the user's that credit calls, by option."""
        named = {"answer_format": self.answer_format, "estimator": self.estimator}
        named["weights"] = self.credit_options.get("weights")  # type: ignore[assignment]
        return {option: name for option, name in named.items() if name and _REFERENCE.fullmatch(name)}

    @property
    def reward_options(self) -> dict[str, Any]:
        """Return the options of reward functions, by the names that `load_reward` takes."""
        return {**self.answer_options(), "timeout": self.reward_timeout, "isolation": self.code_isolation}

    @property
    def loss_options(self) -> dict[str, Any]:
        """Return the options of the policy loss, by the names it takes."""
        names = (*NUMBERS, "loss_type", "importance_sampling_level", "max_completion_length", "score_centering")
        return {name: getattr(self, name) for name in names if hasattr(self, name)}


def _contradictions(c: TrainConfig) -> dict[str, bool]:
    credit, high, url = c.counterfactual(), c.importance_sampling_clip_max, c.vllm_server_base_url
    weighing = {
        f"credit={c.credit}": credit.control != "off",
        "compare_and_correct": c.compare_and_correct > 0,
        "importance_sampling_clip_max": high is not None and c.importance_sampling_mode.startswith("token"),
    }
    weighs = [name for name, does in weighing.items() if does]
    unfit = [name for name in c.reward_funcs if name in BUILT_IN and c.kind not in BUILT_IN[name].kinds]
    judged = " or ".join(BUILT_IN[unfit[0]].kinds) if unfit else ""
    return {
        f"num_generations must be at least 2 for a group to compare, got {c.num_generations}": c.num_generations < 2,
        "stop must name texts that are not empty": "" in (c.stop or []),
        f"generation_batch_size must be a multiple of num_generations, got {c.generation_batch_size} and "
        f"{c.num_generations}": c.generation_batch_size % max(c.num_generations, 1) > 0,
        "importance_sampling_mode has no effect without importance_sampling_clip_max; set it, or drop the mode": (
            c.importance_sampling_mode != "token_truncate" and high is None
        ),
        **dict.fromkeys(unmet_needs(credit, NEEDS.keys() - {EXTERNAL, LOG_RATIOS, TARGETS}), True),
        f"importance_sampling_level must be token or sequence_token with {' and '.join(weighs)}, got sequence: a "
        "completion has one ratio there, so that only the sum of its tokens' weights acts": (
            weights_sequences(c.loss_type, c.importance_sampling_level) and bool(weighs)
        ),
        "merge_adapters: use_peft is off, so there is no adapter to merge; omit one of them": (
            WHOLE in credit.needs and not c.use_peft
        ),
        "dtype: bfloat16 without use_peft would train weights to which most steps are lost by rounding; take mixed": (
            c.dtype == "bfloat16" and not c.use_peft
        ),
        f"vllm_server_base_url must begin with http:// or https://, got {url!r}": (
            not url.startswith(("http://", "https://"))
        ),
        "vllm_server_base_url and vllm_weights: only rollout_engine=vllm reads them; name it, or neither": (
            c.rollout_engine != "vllm" and (url != TrainSettings.vllm_server_base_url or c.vllm_weights != "auto")
        ),
        "vllm_weights: adapter sends a LoRA, and use_peft is off": c.vllm_weights == "adapter" and not c.use_peft,
        f"temperature: a vLLM server takes at most 2, got {c.temperature}": (
            c.rollout_engine == "vllm" and c.temperature > 2
        ),
        "score_centering: needs the ids of a nucleus and their log-probs, and top_p=1 has no nucleus; take a top_p "
        "below 1": c.score_centering and c.top_p == 1,
        "environment: compare_and_correct writes corrections that no environment answers; name one of them": (
            c.environment is not None and c.compare_and_correct > 0
        ),
        f"reward_weights must be finite numbers, got {c.reward_weights}": any(
            w not in Interval() for w in c.reward_weights
        ),
        "reward_funcs must name at least one function, got none": not c.reward_funcs,
        f"reward_weights: {len(c.reward_weights)} weights for {len(c.reward_funcs)} reward_funcs; give one for each, "
        "or none at all": bool(c.reward_weights) and len(c.reward_weights) != len(c.reward_funcs),
        f"reward_funcs: {''.join(unfit[:1])} reads rows of {judged}, and eval_reward {c.grader} {c.kind}": bool(unfit),
        "dataset: 'generated' has no tests; name a file or hub data set with MBPP's columns": (
            c.dataset == GENERATED and c.kind == "mbpp"
        ),
    }


def _of_processes(c: TrainConfig, processes: int) -> dict[str, bool]:
    problems, device = c.generation_batch_size // c.num_generations, c.precision.device
    place, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    on_gpu, in_pieces = device.type == "cuda", c.parallel == "fsdp2"
    return {
        f"generation_batch_size={c.generation_batch_size} is {problems} problems, which {processes} processes cannot "
        f"share equally; use a multiple of {processes} problems": problems % processes > 0,
        f"eval_problems={c.eval_problems}: with a vLLM server each of {processes} processes needs one or more": (
            c.rollout_engine == "vllm" and c.eval_problems is not None and c.eval_problems < processes
        ),
        f"compare_and_correct: runs in one process, and there are {processes}": c.compare_and_correct > 0,
        f"device: {device} is one GPU, and there are {processes} processes; omit it or say cuda": (
            on_gpu and device.index is not None
        ),
        f"device: process {place} of this machine has no GPU; it has {gpus}; start {gpus}": on_gpu and place >= gpus,
        f"estimator: {c.estimator} takes gradients through a model that is whole in one process, which "
        "parallel=fsdp2 does not keep; take parallel=ddp": in_pieces and GRADIENTS in c.counterfactual().needs,
        "merge_adapters: merges weights that are whole in one process, which parallel=fsdp2 does not keep; omit it, or "
        "take parallel=ddp": in_pieces and WHOLE in c.counterfactual().needs,
    }
