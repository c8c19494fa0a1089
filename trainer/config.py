"""Declare every setting of the training program, as one flat dataclass.

Names are TRL's where TRL has one. Class defaults are the CF paper's run; a model folder may hold a `defaults.yaml` with
settings that suit it better. `trainer.cli` fills the dataclass from YAML and flags.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from cfa_kernels import CounterfactualConfig
from cfa_kernels.credit.weights import Control
from cfa_kernels.estimators.base import EXTERNAL
from cfa_kernels.losses.checks import LEVELS, LOSS_TYPES, check_correction, check_level, weights_sequences
from cfa_kernels.ops.token_loss import CORRECTIONS, NUMBERS
from cfa_kernels.options import NOT_NEGATIVE, POSITIVE, Count, Interval, NotNegative, PositiveShare, check_fields

from .precision import DtypeName, Precision
from .rewards.calls import ANSWER_OPTIONS, BUILT_IN, INSTRUCTIONS, load_answer_format

EMBEDDED = "embedded"
GENERATED = "generated"
ASSETS = Path(__file__).parent / "embedded" / "assets"
DEFAULTS_FILE = "defaults.yaml"
_CONTROLS: dict[str, Control | None] = {
    "counterfactual": None, "inverted": "inverted", "permuted": "permuted", "random": "random", "uniform": "off",
}  # fmt: skip
_LOSS_TYPES = tuple(name for name in LOSS_TYPES if name != "bnpo")  # its divisor is that of a part cut by memory
_Positive = Annotated[float, POSITIVE]
_Amount = Annotated[int, NOT_NEGATIVE]


@dataclass
class DataConfig:
    """Settings of the problems that a program learns from and is tested on; equal settings give equal problems."""

    # data
    dataset: str = GENERATED
    """Worked problems: a .json, .jsonl or .parquet file, a hub name, or "generated" (arithmetic word problems)."""
    dataset_config: str | None = None
    """Configuration of a hub data set; by default "main", or else its only one."""
    eval_dataset: str | None = None
    """Held-out problems (file, or hub name with a "test" split). By default the "test" split of a hub data set or of
    "generated"; for a file, eval_problems of its rows are set aside and not trained on."""
    eval_problems: Count | None = None
    """How many held-out problems to evaluate on; all by default (256 for "generated" and for a file)."""
    question_column: str = "question"
    """Column that holds the problem."""
    answer_column: str = "answer"
    """Column that holds the solution ("... #### 72") or the bare number."""
    train_problems: Count | None = None
    """How many training problems to use; all by default (for "generated" 8192, or in warm-up one per sequence)."""

    def __post_init__(self) -> None:
        """Reject values outside their range, naming the setting."""
        check_fields(self)

    @property
    def kind(self) -> str:
        """Kind of the rows: numbers, with an answer in which a number can be read; text, with any; or mbpp."""
        return "numbers"


@dataclass
class TrainConfig(DataConfig):
    """Settings of one run of counterfactual DAPO. Defaults are the CF paper's setting where it states one."""

    # data
    reward_funcs: list[str] = field(default_factory=lambda: ["exact_match"])
    """Reward functions, added up: exact_match, math_verify, code, or "module:function" of your own. The first is right
    for an equal number, the second by math-verify, code for a program that passes its row's tests; yours has TRL's
    signature f(prompts=, completions=, completion_ids=, **columns) -> list of float or None."""
    reward_weights: list[float] = field(default_factory=list)
    """Factors of reward_funcs in the sum, one for each; by default 1. Metrics of each function leave them out."""
    reward_timeout: _Positive = 10.0
    """Seconds after which math_verify and code give up on a completion, with reward 0."""
    code_isolation: Literal["bubblewrap", "none"] = "bubblewrap"
    """Isolation of tested programs from this machine: bubblewrap, or none, which lets them do all that you may do."""
    answer_format: str | None = None
    """Form of answers in place of those that docs/spans.md lists: a regular expression whose one group, or group
    `answer`, is the answer, or "module:function" of a text that gives the answer's start and end."""
    eval_reward: str | None = None
    """Reward function that evaluation counts by: a problem is solved if it gives 1 or more. By default the first of
    reward_funcs that comes with the program and grades, else exact_match. Rows must be of the kind that it judges."""
    eval_samples: _Amount = 0
    """Completions sampled for each held-out problem, beside the greedy one, for pass@k up to that many."""

    # run
    output_dir: str | None = None
    """Run folder, by default one of its own under runs/. It is new, empty, or that of this run, stopped; the run's own
    is named by date, model, credit and seed."""
    resume: bool = True
    """The same command again goes on from the last good checkpoint of its output_dir, or by default of the newest
    unfinished run under runs/ with the same settings. --no_resume starts anew, in a new folder."""
    save_steps: Count = 10
    """Save a checkpoint to go on from every so many steps, at the beginning and at the end; the newest two stay."""
    eval_steps: Count | None = None
    """Also evaluate every so many steps; by default before and after only."""
    max_steps: Count = 500
    """Steps of the run: rollouts, credit, and num_iterations optimizer steps in each."""
    num_iterations: Count = 1
    """Optimizer steps taken on each set of rollouts."""
    learning_rate: _Positive = 2.5e-5
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"
    """Learning rate over the run."""
    max_grad_norm: _Positive = 1.0
    """Gradients are scaled down to this norm."""
    seed: Annotated[int, Interval(0, 2**32 - 1)] = 0
    """Seed of everything drawn at random."""
    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = field(default_factory=list)
    """Further logging back-ends; each must be installed."""
    log_completions: _Amount = 4
    """Completions written to completions.jsonl per step, with their tokens and weights."""
    page_steps: Count = 5
    """Write report.html anew every so many steps, to watch the run by, as after each evaluation and at the end."""

    # model
    model: str = EMBEDDED
    """Model folder or hub name; "embedded" is the small model that comes with the program. Settings of sampling, prompt
    and schedule in the folder's defaults.yaml replace the defaults shown here and those of a --config that ships with
    the program; a --config of yours and flags win over them."""
    use_peft: bool = True
    """Train a LoRA adapter instead of all weights."""
    lora_r: Count = 32
    """Rank of the adapter, on every linear layer but the head; its scale is 32 / lora_r."""
    instruction: str | None = None
    """Text after the question, on a line of its own; may be empty. By default it asks for the form of answers that
    evaluation's reward reads: a line "#### <number>", \\boxed{}, or a fenced block of Python."""

    # credit
    credit: Literal["counterfactual", "inverted", "permuted", "random", "uniform"] = "counterfactual"
    """Spread of credit over tokens: by importance, its inverse, that of other units, at random, or evenly (DAPO)."""
    estimator: str = "masking"
    """Estimator of the importance of a unit: one that docs/credit.md lists, or "module:name" of your own."""
    credit_options: tyro.conf.UseAppendAction[dict[str, bool | int | float | str]] = field(default_factory=dict)
    """An option of the estimator, of the rule for weights or of spans, and its value: --credit_options max_spans 5, or
    for short --max_spans 5. docs/credit.md lists them; by default what the estimator's source does."""
    compare_and_correct: NotNegative = 0.0
    """After IBPO: the policy rewrites wrong completions beside the nearest correct sibling. A correct rewrite raises
    their reward by this much (lambda times rho) before the group is compared, and only tokens that it edits get credit.
    0 leaves completions as they are."""

    # loss
    loss_type: Literal[_LOSS_TYPES] = "dapo"  # type: ignore[valid-type]
    """Loss type: how token losses are formed and summed."""
    importance_sampling_level: Literal[LEVELS] = "token"  # type: ignore[valid-type]
    """Whether probability ratios are per token or per completion (GSPO)."""
    epsilon: NotNegative = 0.2
    """Lower clip: ratios below 1 - epsilon get no gradient. DAPO."""
    epsilon_high: NotNegative = 0.28
    """Upper clip: ratios above 1 + epsilon_high get no gradient. DAPO."""
    beta: NotNegative = 0.0
    """Weight of the KL term towards the model as it was loaded; 0 needs no reference model."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Standard deviation that divides a group's centred rewards."""
    mask_truncated_completions: bool = True
    """Leave completions that hit max_completion_length out of the loss."""
    importance_sampling_clip_max: _Positive | None = None
    """Correct the loss for the engine's log-probs: each token's policy term is multiplied by its probability in the
    update over the one it was sampled with, at most this much (TRL: 3.0). By default it is not."""
    importance_sampling_mode: Literal[CORRECTIONS] = "token_truncate"  # type: ignore[valid-type]
    """How it corrects, with that maximum: the modes of the losses' `sampling_mode`."""
    max_sampling_gap: _Positive | None = None
    """Largest gap, in nats, between the log-probs a batch was sampled with and those its first update computes, as
    docs/rollouts.md defines it; a run with a larger one stops. By default what rounding explains: 0.02 in float32, 0.3
    in bfloat16 and mixed, over the temperature if that is below 1."""

    # rollouts
    generation_batch_size: Count = 64
    """Completions that a step samples, on however many devices; evaluation samples as many at a time."""
    num_generations: int = 8
    """Completions per problem (G), the group that advantages compare."""
    temperature: _Positive = 0.6
    """Sampling temperature; log-probs in the loss are taken at the same one."""
    top_p: PositiveShare = 0.95
    """Nucleus sampling: the smallest set of tokens with this much probability."""
    max_completion_length: Count = 512
    """Maximum tokens sampled per completion."""
    rollout_engine: Literal["transformers", "vllm"] = "transformers"
    """Engine that samples: transformers, in the training process, or a vLLM server, reached through TRL's client."""
    vllm_server_base_url: str = "http://localhost:8000"
    """Address of the vLLM server."""

    # devices
    device: str = "auto"
    """Device, for example "cpu" or "cuda:0"; auto is the first GPU if there is one."""
    dtype: DtypeName = "auto"
    """Arithmetic: float32 throughout; mixed, which keeps weights in float32 and multiplies them in bfloat16 (autocast);
    or bfloat16 weights, beside which adapters are float32. On a GPU auto is bfloat16 under LoRA and mixed if all
    weights train; on a CPU it is float32."""
    parallel: Literal["ddp", "fsdp2"] = "ddp"
    """With several processes, as torchrun starts them: ddp keeps a whole model in each and sums gradients once a
    step; fsdp2 keeps a piece of every weight in each, whole only while it is needed (torch's fully_shard)."""
    token_budget: Count | None = None
    """Maximum packed tokens per forward; a larger group is fed whole. By default as many as half of a GPU's free memory
    holds, and a fixed number on a CPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    torch_compile: Literal["auto", "on", "off"] = "auto"
    """Compile the decoder layers for training and credit, which takes half a minute once; auto does on a GPU, unless
    the weights are in pieces. Layers that do not compile run as they are, and the log names them."""

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
        if self.instruction is None:
            self.instruction = INSTRUCTIONS[self.kind]

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


def model_path(model: str) -> str:
    """Folder of the embedded model, or `model` itself (a folder or hub name)."""
    return str(ASSETS) if model == EMBEDDED else model
