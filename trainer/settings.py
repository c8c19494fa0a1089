"""Declare every setting of the training program as one flat dataclass; this imports no torch, which takes seconds.

Names are TRL's where TRL has one. Class defaults are the CF paper's run; a model folder may hold a `defaults.yaml` with
settings that suit it better. `cli` fills the dataclass from YAML and flags, `config` checks what came of it.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from cfa_kernels.credit.presets import NONE
from cfa_kernels.options import POSITIVE, Count, Interval, NotNegative, PositiveShare

EMBEDDED = "embedded"
GENERATED = "generated"
ASSETS = Path(__file__).parent / "embedded" / "assets"
CONFIGS = Path(__file__).parent / "configs"
"""Folder of the runs that `--config` takes by name."""
DEFAULTS_FILE = "defaults.yaml"
FILES = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
"""Endings of files of rows, and what `datasets` calls them."""
EXAMPLE_POOL = 256
"""Training problems, from the first on, of which the shortest are worked examples."""

CHANGE_NO_RESULT = frozenset({"output_dir", "resume", "save_steps", "report_to", "log_completions", "page_steps"})
"""Settings of where and how often a run saves and logs."""

Amount = Annotated[int, Interval(0)]
Positive = Annotated[float, POSITIVE]


@dataclass
class TrainSettings:
    """Settings of one run of counterfactual DAPO. Defaults are the CF paper's setting where it states one."""

    # data
    dataset: str = GENERATED
    """Worked problems: a .json, .jsonl or .parquet file, a hub name, or "generated" (arithmetic word problems)."""
    dataset_config: str | None = None
    """Configuration of a hub data set; by default "main", or else its only one."""
    eval_dataset: str | None = None
    """Held-out problems, a file or hub name; by default the "test" split, or else eval_problems rows set aside."""
    eval_problems: Count | None = None
    """Held-out problems to evaluate on; all by default (256 for "generated" and for a file)."""
    question_column: str = "question"
    """Column that holds the problem: text, or messages with a role and a content, as chat formats have them."""
    answer_column: str = "answer"
    """Column that holds the solution ("... #### 72") or the bare number; a.b is the field b of a column a."""
    train_problems: Count | None = None
    """Training problems to use; all by default (for "generated" 8192)."""
    reward_funcs: list[str] = field(default_factory=lambda: ["exact_match"])
    """Reward functions, added up: names that docs/rewards.md lists, or your "module:function" as in TRL."""
    reward_weights: list[float] = field(default_factory=list)
    """Factors of reward_funcs in the sum, one for each; by default 1. Metrics of each function are without them."""
    reward_timeout: Positive = 10.0
    """Seconds after which math_verify gives up on a completion, with reward 0."""
    eval_reward: str | None = None
    """Reward function that evaluation counts by, 1 or more solves; by default the first built-in of reward_funcs."""
    environment: str | None = None
    """Your "module:function" that makes an engine of engine, tokenizer, ends and thought_tags, whose environment
    answers the policy's calls. examples.environments:calculator completes sums such as `<<48/2=`."""
    eval_samples: Amount = 0
    """Completions sampled for each held-out problem, in addition to the greedy one, for pass@k up to that many."""

    # run
    output_dir: str | None = None
    """Run folder: new, empty, or with this run, interrupted; by default one under runs/ named by the date."""
    resume: bool = True
    """Resume from the last checkpoint of output_dir; --no_resume starts again, in a new folder."""
    save_steps: Count = 10
    """Save a checkpoint every so many steps, at the beginning and at the end; the newest two stay."""
    eval_steps: Count | None = None
    """Also evaluate every so many steps; by default before and after only."""
    max_steps: Amount = 500
    """Steps of the run: rollouts, credit, and num_iterations optimizer steps in each; 0 evaluates only."""
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
    """Completions written to completions.jsonl per step, half of them with spans."""
    page_steps: Count = 5
    """Rewrite report.html every so many steps (also after each evaluation and at the end)."""

    # model
    model: str = EMBEDDED
    """Model folder or hub name; "embedded" is the small model that comes with the program. A defaults.yaml in the
    folder replaces defaults shown here; --config and flags win over it."""
    use_peft: bool = True
    """Train a LoRA adapter instead of all weights."""
    lora_r: Count = 32
    """Rank of the adapter, on every linear layer but the head; its scale is 32 / lora_r."""
    instruction: str | None = None
    """Text after the question, on a separate line; may be empty. By default it asks for the form of answers that
    evaluation's reward reads, a line "#### <number>" or \\boxed{}, and adds nothing to messages of the data."""
    examples: Annotated[int, Interval(0, EXAMPLE_POOL)] = 0
    """Worked examples before each question, as earlier turns with their solutions. The shortest of the first 256
    training problems are taken, whatever the seed, and are not trained on."""
    system_prompt: str | None = None
    """Text of a system message before the question, in place of the data's; by default theirs, or none."""
    enable_thinking: bool = False
    """Let the chat template open a thought, or ask for one, as those of Qwen3 do."""

    # credit
    credit: str = NONE
    """Credit of tokens: a preset that docs/papers.md lists, or none, which trains plain GRPO or DAPO. Options by path
    choose or change its parts: --estimator gradient --estimator.samples 4, --spans.max_spans 5."""
    credit_options: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
    """Options of credit by path: keys of a file and flags that name no setting. The library checks them."""
    shaping_func: str | None = None
    """Your "module:function" of trainer, samples and `Shaped` that returns a changed copy of the last: rewards before
    groups are compared, and factors of token weights."""

    # loss
    loss_type: str = "dapo"
    """Loss type: how token losses are formed and summed; docs/papers.md lists them."""
    importance_sampling_level: str = "token"
    """Level of probability ratios: token, sequence (GSPO) or sequence_token."""
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
    """Multiply each token's policy term by its probability in the update over the engine's, at most this much
    (TRL: 3.0); by default it is not."""
    importance_sampling_mode: str = "token_truncate"
    """Correction to apply up to `importance_sampling_clip_max`; see `sampling_mode` of `policy_loss`."""
    score_centering: bool = False
    """Subtract from each token's gradient its mean over the nucleus, by the sampler's probabilities."""
    max_sampling_gap: Positive | None = None
    """Largest gap, in nats, between the log-probs a batch was sampled with and those its first update computes
    (docs/rollouts.md); a run with a larger one stops. By default what rounding explains."""

    # rollouts
    generation_batch_size: Count = 64
    """Completions that a step samples, on however many devices; evaluation samples as many at a time."""
    num_generations: Annotated[int, Interval(2)] = 8
    """Completions per problem (G), the group that advantages compare."""
    temperature: Positive = 0.6
    """Sampling temperature; log-probs in the loss are taken at the same one."""
    top_p: PositiveShare = 0.95
    """Nucleus sampling: the smallest set of tokens with this much probability."""
    max_completion_length: Count = 512
    """Maximum tokens sampled per completion."""
    stop: list[str] | None = None
    """Texts that end a completion, which ends before them; by default "Question:" without a chat template."""
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
    dtype: Literal["auto", "float32", "mixed", "bfloat16"] = "auto"
    """Arithmetic: float32; mixed, which keeps weights in float32 and multiplies them in bfloat16 (autocast); or
    bfloat16 weights, which needs use_peft. auto is bfloat16 under LoRA on a GPU, or a CPU that multiplies it (AMX,
    AVX512-BF16); else it is mixed on a GPU and float32 on a CPU."""
    parallel: Literal["ddp", "fsdp2"] = "ddp"
    """With several processes, as torchrun starts them: ddp keeps a whole model in each, fsdp2 pieces of all weights."""
    token_budget: Count | None = None
    """Maximum packed tokens per forward; a larger group is fed whole. By default what half of the free memory holds."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    torch_compile: Literal["auto", "on", "off"] = "auto"
    """Compile the decoder layers for training and credit, which takes half a minute once; auto does on a GPU."""

    @property
    def kind(self) -> str:
        """Kind of the rows: numbers, with an answer in which a number can be read; or text, with any."""
        return "numbers"


def model_path(model: str) -> str:
    """Folder of the embedded model, or `model` itself (a folder or hub name)."""
    return str(ASSETS) if model == EMBEDDED else model


def require_data(name: str) -> None:
    """Raise `ValueError` for a name of data that is neither a file of rows, nor one of the hub, nor "generated"."""
    if name != GENERATED and (Path(name).exists() != (Path(name).suffix in FILES) or Path(name).is_dir()):
        raise ValueError(f"dataset {name}: expected a .json, .jsonl or .parquet file that exists, or a hub name")


def require_model(name: str) -> None:
    """Raise `FileNotFoundError` for a model that can only be a folder, and is none."""
    folder = Path(model_path(name))
    if (folder.is_absolute() or name.startswith(".") or len(folder.parts) > 2) and not folder.is_dir():
        raise FileNotFoundError(f"model {name}: there is no such folder")
