"""Declare every setting of the training program as one flat dataclass; this imports no torch, which takes seconds.

Names are TRL's where TRL has one. Class defaults are the CF paper's run; a model folder may hold a `defaults.yaml` with
settings that suit it better. `cli` fills the dataclass from YAML and flags, `config` checks what came of it.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from cfa_kernels.options import POSITIVE, Count, Interval, NotNegative, PositiveShare

EMBEDDED = "embedded"
GENERATED = "generated"
ASSETS = Path(__file__).parent / "embedded" / "assets"
DEFAULTS_FILE = "defaults.yaml"
FILES = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
"""Endings of files of rows, and what `datasets` calls them."""

# Names that modules with torch declare; tests/trainer/test_config.py compares them.
LossType = Literal[
    "grpo", "dr_grpo", "dapo", "dppo", "reinforce", "luspo", "cispo", "cispo_two_sided", "vespo", "gmpo", "sapo"
]
"""All of the library's but bnpo, whose divisor is that of a part cut by memory."""
Level = Literal["token", "sequence", "sequence_token"]
Correction = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"]
DtypeName = Literal["auto", "float32", "mixed", "bfloat16"]
CREDIT_OPTIONS = (
    "weights", "units", "completions", "normalize", "open_spans", "outcome", "mask", "samples", "preselect",
    "preselect_by", "placeholder_id", "sigma", "alpha", "kappa", "correct_threshold", "w_min", "w_max",
    "w_answer", "strength", "mask_observation", "merge_adapters",
    "min_spread", "tau", "boost", "floor", "fraction", "detector", "max_spans", "selection", "answer_format",
    "answer_fallback", "lead_in", "thought_tags",
)  # fmt: skip
"""Options of credit, which are flags too."""


CHANGE_NO_RESULT = frozenset({"output_dir", "resume", "save_steps", "report_to", "log_completions", "page_steps"})
"""Settings of where and how often a run saves and logs."""

Amount = Annotated[int, Interval(0)]
Positive = Annotated[float, POSITIVE]


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
    "generated"; of a file or a data set without one, eval_problems rows are set aside and not trained on."""
    eval_problems: Count | None = None
    """Held-out problems to evaluate on; all by default (256 for "generated" and for a file)."""
    question_column: str = "question"
    """Column that holds the problem: text, or messages with a role and a content, as chat formats have them."""
    answer_column: str = "answer"
    """Column that holds the solution ("... #### 72") or the bare number; reward_model.ground_truth is that field of a
    column reward_model."""
    train_problems: Count | None = None
    """Training problems to use; all by default (for "generated" 8192, or in warm-up one per sequence)."""

    @property
    def kind(self) -> str:
        """Kind of the rows: numbers, with an answer in which a number can be read; text, with any; or mbpp."""
        return "numbers"


@dataclass
class TrainSettings(DataConfig):
    """Settings of one run of counterfactual DAPO. Defaults are the CF paper's setting where it states one."""

    reward_funcs: list[str] = field(default_factory=lambda: ["exact_match"])
    """Reward functions, added up: exact_match, math_verify, code, or your "module:function". The first is right
    for an equal number, the second by math-verify, code for a program that passes its row's tests; yours has TRL's
    signature f(prompts=, completions=, completion_ids=, **columns) -> list of float or None."""
    reward_weights: list[float] = field(default_factory=list)
    """Factors of reward_funcs in the sum, one for each; by default 1. Metrics of each function are without them."""
    reward_timeout: Positive = 10.0
    """Seconds after which math_verify and code give up on a completion, with reward 0."""
    code_isolation: Literal["bubblewrap", "none"] = "bubblewrap"
    """Isolation of tested programs from this machine: bubblewrap, or none, which lets them do all that you may do."""
    answer_format: str | None = None
    """Form of answers in place of those that docs/spans.md lists: a regular expression whose one group, or group
    `answer`, is the answer, or "module:function" of a text that gives the answer's start and end."""
    eval_reward: str | None = None
    """Reward function that evaluation counts by: a problem is solved if it gives 1 or more. By default the first of
    reward_funcs that comes with the program and grades, else exact_match. Rows must be of the kind that it reads."""
    environment: str | None = None
    """Environment that answers the policy's calls: calculator, which completes sums such as `<<48/2=`, or
    "module:Class" with reset(), step(text) -> text and a pattern, call, that ends a turn. Its tokens are not trained
    on."""
    eval_samples: Amount = 0
    """Completions sampled for each held-out problem, in addition to the greedy one, for pass@k up to that many."""

    # run
    output_dir: str | None = None
    """Run folder: new, empty, or with this run, interrupted. The default under runs/ has date, model, credit and seed
    in its name."""
    resume: bool = True
    """The same command again resumes from the last checkpoint of its output_dir. --no_resume starts again, in a new
    folder."""
    save_steps: Count = 10
    """Save a checkpoint every so many steps, at the beginning and at the end; the newest two stay."""
    eval_steps: Count | None = None
    """Also evaluate every so many steps; by default before and after only."""
    max_steps: Count = 500
    """Steps of the run: rollouts, credit, and num_iterations optimizer steps in each."""
    num_iterations: Count = 1
    """Optimizer steps taken on each set of rollouts."""
    learning_rate: Positive = 2.5e-5
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"
    """Learning rate over the run."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm."""
    seed: Annotated[int, Interval(0, 2**32 - 1)] = 0
    """Seed of everything drawn at random."""
    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = field(default_factory=list)
    """Further logging back-ends; each must be installed."""
    log_completions: Amount = 4
    """Completions written to completions.jsonl per step, with their tokens and weights: half are the first with spans,
    the others are spread over the batch."""
    page_steps: Count = 5
    """Rewrite report.html every so many steps (also after each evaluation and at the end)."""

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
    """Text after the question, on a separate line; may be empty. By default it asks for the form of answers that
    evaluation's reward reads: a line "#### <number>", \\boxed{}, or a fenced block of Python. Messages of the data have
    their own, so nothing is added to them by default."""
    system_prompt: str | None = None
    """Text of a system message before the question, in place of the data's; by default theirs, or none."""
    enable_thinking: bool = False
    """Let the chat template open a thought, or ask for one, as those of Qwen3 do."""

    # credit
    credit: Literal["counterfactual", "inverted", "permuted", "random", "uniform"] = "counterfactual"
    """Spread of credit over tokens: by importance, its inverse, that of other units, at random, or evenly (DAPO)."""
    estimator: str = "masking"
    """Estimator of the importance of a unit: one that docs/credit.md lists, or your "module:name"."""
    credit_options: tyro.conf.UseAppendAction[dict[str, bool | int | float | str]] = field(default_factory=dict)
    """An option of the estimator, of the rule for weights or of spans, and its value: --credit_options max_spans 5, or
    for short --max_spans 5. docs/credit.md lists them; by default what the estimator's source does."""
    compare_and_correct: NotNegative = 0.0
    """After IBPO: the policy rewrites wrong completions next to the nearest correct sibling. A correct rewrite raises
    their reward by this much (lambda times rho) before the group is compared, and only tokens that it edits get credit.
    0 leaves completions as they are."""

    # loss
    loss_type: LossType = "dapo"
    """Loss type: how token losses are formed and summed."""
    importance_sampling_level: Level = "token"
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
    importance_sampling_clip_max: Positive | None = None
    """Correct the loss for the engine's log-probs: each token's policy term is multiplied by its probability in the
    update over the one it was sampled with, at most this much (TRL: 3.0). By default it is not."""
    importance_sampling_mode: Correction = "token_truncate"
    """Correction to apply up to `importance_sampling_clip_max`; see `sampling_mode` of `policy_loss`."""
    score_centering: bool = False
    """Subtract from each token's gradient its mean over the nucleus, by the sampler's probabilities: it then does not
    drift towards a sampler that differs from the policy. Later iterations take their ratios to the sampler too."""
    max_sampling_gap: Positive | None = None
    """Largest gap, in nats, between the log-probs a batch was sampled with and those its first update computes, as
    docs/rollouts.md defines it; a run with a larger one stops. By default what rounding explains: 0.02 in float32, 0.3
    in bfloat16 and mixed, over the temperature if that is below 1."""

    # rollouts
    generation_batch_size: Count = 64
    """Completions that a step samples, on however many devices; evaluation samples as many at a time."""
    num_generations: int = 8
    """Completions per problem (G), the group that advantages compare."""
    temperature: Positive = 0.6
    """Sampling temperature; log-probs in the loss are taken at the same one."""
    top_p: PositiveShare = 0.95
    """Nucleus sampling: the smallest set of tokens with this much probability."""
    max_completion_length: Count = 512
    """Maximum tokens sampled per completion."""
    stop: list[str] | None = None
    """Texts that end a completion, which ends before them. By default the header of the next question where the program
    writes the prompt itself, for a model without a chat template; none otherwise."""
    rollout_engine: Literal["transformers", "vllm"] = "transformers"
    """Engine that samples: transformers, in the training process, or a vLLM server, reached through TRL's client."""
    vllm_server_base_url: str = "http://localhost:8000"
    """Address of the vLLM server."""
    vllm_weights: Literal["auto", "adapter", "nccl", "file"] = "auto"
    """Transport of new weights to the vLLM server: adapter, a LoRA in a file; nccl, all weights between two GPUs; file,
    all weights in a file. auto is the first that policy and server allow."""

    # devices
    device: str = "auto"
    """Device, for example "cpu" or "cuda:0"; auto is the first GPU if there is one."""
    dtype: DtypeName = "auto"
    """Arithmetic: float32 throughout; mixed, which keeps weights in float32 and multiplies them in bfloat16 (autocast);
    or bfloat16 weights with float32 adapters, which needs use_peft. On a GPU auto is bfloat16 under LoRA and mixed if
    all weights train; on a CPU it is float32."""
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


def model_path(model: str) -> str:
    """Folder of the embedded model, or `model` itself (a folder or hub name)."""
    return str(ASSETS) if model == EMBEDDED else model


def require_data(name: str) -> None:
    """Raise `ValueError` for a name of data that is neither a file of rows, nor one of the hub, nor "generated"."""
    if name != GENERATED and (Path(name).exists() != (Path(name).suffix in FILES) or Path(name).is_dir()):
        files = "a .json, .jsonl or .parquet file that exists"
        raise ValueError(f"dataset {name}: expected {files}, a hub name or {GENERATED!r}")


def require_model(name: str) -> None:
    """Raise `FileNotFoundError` for a model that can only be a folder, and is none."""
    folder = Path(model_path(name))
    if (folder.is_absolute() or name.startswith(".") or len(folder.parts) > 2) and not folder.is_dir():
        raise FileNotFoundError(f"model {name}: there is no such folder")
