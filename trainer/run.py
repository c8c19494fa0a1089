"""Set up a run, train with evaluations around it, and save the model."""

import dataclasses
import time
from pathlib import Path

from transformers import get_scheduler, set_seed

from cfa_kernels.hf.model import context_length
from trainer import processes
from trainer.calls import RewardError, require_callable
from trainer.checkpoints import Reference, load_policy, load_tokenizer, save_policy
from trainer.checks import require_supported, sampling_gap_limit
from trainer.config import TrainConfig
from trainer.data import encode_prompts, train_and_eval_rows
from trainer.evaluate import evaluate
from trainer.experimental.hook import check_experiments
from trainer.nonfinite import attempted_step
from trainer.precision import adamw
from trainer.preflight import check_before_loading, require_place
from trainer.report import Report, Silence
from trainer.rewards import load_reward, load_rewards
from trainer.rollouts import engine_for
from trainer.state import Trainer
from trainer.step import problem_batches


def set_up(config: TrainConfig) -> Trainer:
    """Set up everything a run needs, checked before it starts.

    Raises:
        ValueError, OSError, ImportError: a setting, a row of data, a checkpoint or a reward function is not what it
            must be; the message names it.
        FloatingPointError: a weight of the model is not finite.
        NotImplementedError: the model's log-probs cannot be taken or its answers not scored; the message names the
            model and the reason.
    """
    processes.start(config)
    if processes.is_first():
        _require_unused(run_folder(config))
    check_before_loading(config)
    rewards = load_rewards(config.reward_funcs, **config.answer_options())
    rows, held_out = train_and_eval_rows(config)
    require_callable(rewards, rows[0])
    tokenizer, architecture = load_tokenizer(config)
    limit = context_length(architecture)
    prompts, held_out_prompts = (encode_prompts(part, tokenizer, config, limit) for part in (rows, held_out))
    set_seed(config.seed)
    policy = load_policy(config, tokenizer)
    longest = max(map(len, prompts + held_out_prompts)) + config.max_completion_length
    with config.precision.autocast():
        require_supported(policy, longest)
    reference = Reference(policy) if config.beta else None
    moving = processes.count() > 1 and config.parallel == "fsdp2"  # CUDA graphs do not follow weights that move
    sampling = dataclasses.replace(config, rollout_cache="dynamic") if moving else config
    engine = engine_for(policy, tokenizer, sampling, config.precision, sampling_gap_limit(config, policy))
    for model in [policy, reference.copy] if reference and reference.copy else [policy]:
        processes.distribute(model, config)
    if moving:  # as it runs from now on
        with config.precision.autocast():
            require_supported(policy, longest)
    optimizer = adamw(
        [p for p in policy.parameters() if p.requires_grad],
        config.precision.device,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
    )
    scheduler = get_scheduler(config.lr_scheduler_type, optimizer, config.warmup_steps, config.max_steps)
    trainer = Trainer(
        config, policy, tokenizer, engine, optimizer, scheduler, reference, rewards, rows, prompts, held_out,
        held_out_prompts,
    )  # fmt: skip
    check_experiments(trainer)
    return trainer


def train(trainer: Trainer) -> Path:
    """Evaluate, train, evaluate again, save; give the run folder.

    Raises:
        FloatingPointError: log-probs, gradients, rewards or weights cannot be trusted; the message names step and
            samples. No model is saved then.
        RewardError: a reward function failed; the message names step, function and row.
    """
    config, folder = trainer.config, processes.gathered(run_folder(trainer.config))[0]
    if processes.is_first():
        _require_unused(folder)
        folder.mkdir(parents=True, exist_ok=True)
    with Report(folder, config, trainer.tokenizer) if processes.is_first() else Silence() as report:
        report.opening(trainer.policy, len(trainer.rows), len(trainer.held_out), trainer.engine.notes)

        def evaluate_at(step: int) -> None:
            share = processes.own(trainer.held_out)
            with report.evaluating(step, len(share)) as advance, processes.whole(trainer.policy):
                result = evaluate(
                    trainer.engine,
                    trainer.held_out,
                    trainer.held_out_prompts,
                    batch_size=config.eval_batch_size,
                    max_completion_length=config.max_completion_length,
                    match=load_reward("exact_match", **config.answer_options()),
                    advance=advance,
                )
            report.evaluated(step, result)

        per_step = config.generation_batch_size // config.num_generations
        batches, step = problem_batches(len(trainer.rows), per_step, config.seed), 0
        try:
            evaluate_at(0)
            for step in range(1, config.max_steps + 1):
                report.stepped(step, attempted_step(trainer, step, next(batches)))
                if step == config.max_steps or (config.eval_steps and step % config.eval_steps == 0):
                    evaluate_at(step)
            save_policy(trainer.policy, trainer.tokenizer, folder / ("adapter" if config.use_peft else "checkpoint"))
        except (FloatingPointError, RewardError) as problem:
            kind = RewardError if isinstance(problem, RewardError) else FloatingPointError
            raise kind(f"step {step}, {problem}; nothing was saved") from problem
        report.closing()
        processes.gathered(None)  # the others end when the first has saved
    return folder


def run_folder(config: TrainConfig) -> Path:
    """Name the folder for a run's files: `output_dir`, or a folder of its own under `runs`."""
    if config.output_dir is not None:
        return Path(config.output_dir)
    started = time.strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{started}-{Path(config.model).name}-{config.credit}-seed{config.seed}"


def _require_unused(folder: Path) -> None:
    require_place(folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(f"output_dir: {folder} is not empty; name another folder or remove it")
