"""Check the settings of a run against each other and the library, and turn them into what its parts take."""

from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from cfa_kernels import CounterfactualConfig
from cfa_kernels.credit.weights import Control
from cfa_kernels.loss.checks import check_correction, check_level
from cfa_kernels.loss.token_loss import NUMBERS
from cfa_kernels.options import Interval, check_fields

from .precision import Precision
from .refusals import refuse
from .rewards.built_in import BUILT_IN, INSTRUCTIONS
from .rewards.calls import ANSWER_OPTIONS, load_answer_format
from .settings import DataSettings, Range, TrainSettings

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
        check_level(vars(self))
        refuse(self)
        if (high := self.importance_sampling_clip_max) is not None:
            correction = {"sampling_mode": self.importance_sampling_mode, "sampling_clip_max": high}
            check_correction(correction | {"sampling_logprobs": ...}, self.loss_type, self.importance_sampling_level)

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
