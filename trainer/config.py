"""Check the settings of a run against each other and the library, and turn them into what its parts take."""

from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from cfa_kernels import CounterfactualConfig
from cfa_kernels.credit.weights import Control
from cfa_kernels.estimators.base import EXTERNAL
from cfa_kernels.losses.checks import check_correction, check_level, weights_sequences
from cfa_kernels.ops.token_loss import NUMBERS
from cfa_kernels.options import Interval, check_fields

from .precision import Precision
from .rewards.calls import ANSWER_OPTIONS, BUILT_IN, INSTRUCTIONS, load_answer_format
from .settings import GENERATED, DataSettings, Range, TrainSettings

_CONTROLS: dict[str, Control | None] = {
    "counterfactual": None, "inverted": "inverted", "permuted": "permuted", "random": "random", "uniform": "off",
}  # fmt: skip


@dataclass
class DataConfig(DataSettings):
    """Settings of the problems that a program learns from and is tested on; equal settings give equal problems."""

    def __post_init__(self) -> None:
        """Reject values outside their range, naming the setting."""
        check_fields(self)

    @property
    def kind(self) -> str:
        """Kind of the rows: numbers, with an answer in which a number can be read; text, with any; or mbpp."""
        return "numbers"


@dataclass
class TrainConfig(TrainSettings, DataConfig):
    """Settings of one run of counterfactual DAPO, checked. Defaults are the CF paper's where it states one."""

    def __post_init__(self) -> None:
        """Reject values outside their range, naming the setting."""
        super().__post_init__()
        try:
            Precision.of(self.dtype, self.device, adapters=self.use_peft)
        except RuntimeError as problem:
            raise ValueError(f"device must be auto, cpu or a GPU such as cuda:0, got {self.device!r}") from problem
        if self.num_generations < 2:
            raise ValueError(f"num_generations must be at least 2 for a group to compare, got {self.num_generations}")
        if self.generation_batch_size % self.num_generations:
            sizes = f"{self.generation_batch_size} and {self.num_generations}"
            raise ValueError(f"generation_batch_size must be a multiple of num_generations, got {sizes}")
        if self.importance_sampling_mode != "token_truncate" and self.importance_sampling_clip_max is None:
            raise ValueError("importance_sampling_mode is read with importance_sampling_clip_max only, which is None")
        check_level(vars(self))
        config = self.counterfactual()  # checks the settings of credit
        if EXTERNAL in config.needs:
            raise ValueError(f"estimator: {self.estimator} needs importances from a caller; give 'module:name'")
        credit = config.control != "off"
        if weights_sequences(self.loss_type, self.importance_sampling_level):
            weighing = {
                f"credit={self.credit}": credit,
                "compare_and_correct": self.compare_and_correct > 0,
                "importance_sampling_clip_max": self.importance_sampling_clip_max is not None
                and self.importance_sampling_mode.startswith("token"),
            }
            if names := [name for name, weighs in weighing.items() if weighs]:
                raise ValueError(
                    f"importance_sampling_level must be token or sequence_token with {' and '.join(names)}, got "
                    "sequence: a completion has one ratio there, so that only the sum of its tokens' weights acts"
                )
        if (high := self.importance_sampling_clip_max) is not None:
            correction = {"sampling_mode": self.importance_sampling_mode, "sampling_clip_max": high}
            check_correction(correction | {"sampling_logprobs": ...}, self.loss_type, self.importance_sampling_level)
        if not (url := self.vllm_server_base_url).startswith(("http://", "https://")):
            raise ValueError(f"vllm_server_base_url must begin with http:// or https://, got {url!r}")
        if self.rollout_engine != "vllm" and url != TrainConfig.vllm_server_base_url:
            raise ValueError("vllm_server_base_url: only rollout_engine=vllm reads it; name both or neither")
        if not self.reward_funcs:
            raise ValueError("reward_funcs must name at least one function, got none")
        if self.reward_weights and len(self.reward_weights) != len(self.reward_funcs):
            sizes = f"{len(self.reward_weights)} weights for {len(self.reward_funcs)} reward_funcs"
            raise ValueError(f"reward_weights: {sizes}; give one for each, or none at all")
        for name in self.reward_funcs:
            if name in BUILT_IN and self.kind not in BUILT_IN[name].kinds:
                own, other = " or ".join(BUILT_IN[name].kinds), f"eval_reward {self.grader} {self.kind}"
                raise ValueError(f"reward_funcs: {name} judges rows of {own}, and {other}")
        if self.dataset == GENERATED and self.kind == "mbpp":
            raise ValueError("dataset: 'generated' has no tests; name a file or hub data set with MBPP's columns")

    @property
    def grader(self) -> str:
        """Name of the reward function that evaluation counts by."""
        graders = (name for name in self.reward_funcs if name in BUILT_IN and BUILT_IN[name].grades)
        return self.eval_reward or next(graders, "exact_match")

    @property
    def kind(self) -> str:
        """Kind of the rows: the one that the grader judges."""
        return BUILT_IN[self.grader].kinds[0] if self.grader in BUILT_IN else "text"

    @property
    def question_instruction(self) -> str:
        """Text after a question that is no list of messages."""
        return INSTRUCTIONS[self.kind] if self.instruction is None else self.instruction

    @property
    def precision(self) -> Precision:
        """Return the arithmetic that `dtype`, `device` and `use_peft` choose."""
        return Precision.of(self.dtype, self.device, adapters=self.use_peft)

    def counterfactual(self) -> CounterfactualConfig:
        """Build the library's configuration of credit."""
        options = {"estimator": self.estimator, "control": _CONTROLS[self.credit], "token_budget": self.token_budget}
        return CounterfactualConfig.from_flat({**self.credit_options, **options, **self.answer_options()})

    def answer_options(self) -> dict[str, Any]:
        """Return the run's own form of answers, by the names of `AnswerRules`."""
        others = {name: self.credit_options[name] for name in ANSWER_OPTIONS if name in self.credit_options}
        return {"answer_format": load_answer_format(self.answer_format), **others}

    @property
    def reward_options(self) -> dict[str, Any]:
        """Return the options of reward functions, by the names that `load_reward` takes."""
        return {**self.answer_options(), "timeout": self.reward_timeout, "isolation": self.code_isolation}

    @property
    def loss_options(self) -> dict[str, Any]:
        """Return the options of the policy loss, by the names it takes."""
        names = (*NUMBERS, "loss_type", "importance_sampling_level", "max_completion_length")
        return {name: getattr(self, name) for name in names if hasattr(self, name)}


def _with_intervals(hint: Any) -> Any:
    """Put the library's `Interval` in the place of a `Range`, for `check_fields`."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Annotated:
        kind, mark = inside
        return Annotated[kind, Interval(*mark)] if isinstance(mark, Range) else hint
    return Union[tuple(map(_with_intervals, inside))] if origin in (Union, UnionType) else hint  # noqa: UP007


for _kind in (DataConfig, TrainConfig):
    _kind.__annotations__ = {k: _with_intervals(v) for k, v in get_type_hints(_kind, include_extras=True).items()}
