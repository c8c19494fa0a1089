"""Run the program: set up, train with evaluations and checkpoints in between, save, say in one line what is wrong."""

import atexit
import contextlib
import gc
import itertools
import logging
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from transformers import get_scheduler, set_seed
from transformers.utils.logging import disable_progress_bar

from cfa_kernels.model.compile_layers import compile_layers
from cfa_kernels.model.memory import is_out_of_memory, keep_freed_memory
from cfa_kernels.model.parts import causal_lm, context_length, vocab_size
from cfa_kernels.options import imported
from cfa_kernels.text.offsets import describe_spare_ids

from . import processes
from .checkpoints import Finished, Refused, RunFolder, open_run
from .cli import refusing
from .config import TrainConfig
from .data import encode_prompts, require_whole_prompt, stop_clock, stop_strings, take_examples, train_and_eval_rows
from .disk import DiskError, whole_folder
from .endings import Ended, Ending
from .evaluate import evaluate
from .extras import program
from .metrics import require_supported, sampling_gap_limit
from .policy import load_policy, load_tokenizer, save_policy
from .precision import frozen_copy, require_device
from .report.report import Report, Silence, tracker_library
from .rewards.calls import RewardError, load_reward, load_rewards, require_callable
from .rollouts.engine import Engine, end_ids
from .rollouts.in_process import TransformersEngine
from .rollouts.vllm import VllmEngine, await_server
from .settings import TrainSettings
from .state import Trainer
from .step import problem_batches, training_step

_LOG = logging.getLogger(__name__)
# Problems that one line explains; others, and a ValueError elsewhere than in set-up, are mistakes of ours.
_PROBLEMS = (Refused, RewardError, OSError, ImportError, FloatingPointError, NotImplementedError)


def main(settings: TrainSettings) -> int:
    """Run the program: exit code 0; 1 or 2 and one line on stderr for what is wrong with settings, data or the disk."""
    with refusing(program("trainer")):
        config = TrainConfig(**vars(settings))
    disable_progress_bar()
    keep_freed_memory()
    expected: tuple[type[Exception], ...] = (ValueError, *_PROBLEMS)
    with Ending() as ending:
        try:
            processes.start(config)
            with open_run(config) as folder:
                trainer = set_up(config, folder.started)
                expected = _PROBLEMS
                gc.collect()
                gc.freeze()  # to look at what stays, modules and tokenizer, takes a fifth of a second each time
                atexit.register(gc.unfreeze)  # else modules outlive the interpreter; Triton 3.9 calls that a leak
                train(trainer, folder, ending)
        except Finished as finished:
            _say(str(finished), sys.stdout)
        except Ended as ended:
            _say(processes.describe_failure(ended))
        except Exception as problem:
            if isinstance(problem, MemoryError) or is_out_of_memory(problem):  # others may wait inside a forward
                said = f"rank {processes.rank()}: out of memory ({' '.join(str(problem).split())})"
                print(f"error: {said}; lower token_budget, max_completion_length or num_generations", file=sys.stderr)
                return 1
            if not isinstance(problem, expected):
                raise
            _say(f"error: {' '.join(processes.describe_failure(problem).split())}")
            processes.end()
            return 1
    processes.end()
    return 130 if ending.signal == signal.SIGINT else 0


def set_up(config: TrainConfig, started: datetime | None = None) -> Trainer:
    """Set up everything a run needs; `started` is when it began, whose date chat templates write, by default now.

    What is wrong raises an error that names the setting, the row of data, the reward function or the model.
    """
    stop_clock(started or datetime.now())
    # A reward, a row or a prompt that is wrong must not wait until a model is loaded.
    for name in config.report_to:
        tracker_library(name)
    require_device(config.precision.device)
    if config.rollout_engine == "vllm":
        await_server(config.vllm_server_base_url)
    options = {**vars(config.counterfactual().answers), "timeout": config.reward_timeout}
    rewards = load_rewards(config.reward_funcs, **options)
    loaded = dict(zip(config.reward_funcs, rewards.values(), strict=True))
    grader = loaded.get(config.grader) or load_reward(config.grader, **options)
    play = imported("environment", config.environment) if config.environment else None
    shape = imported("shaping_func", config.shaping_func) if config.shaping_func else None
    rows, held_out = train_and_eval_rows(config)
    examples, rows = take_examples(rows, config.examples)
    require_callable(rewards, rows[0])
    require_callable({config.grader: grader}, held_out[0])
    tokenizer, architecture = load_tokenizer(config)
    require_whole_prompt(tokenizer, config.model)
    limit = context_length(architecture)
    prompts, held_out_prompts = (encode_prompts(part, tokenizer, config, limit, examples) for part in (rows, held_out))
    longest = max(map(len, prompts + held_out_prompts)) + config.max_completion_length

    set_seed(config.seed)  # adapters begin at random
    moving = processes.count() > 1 and config.parallel == "fsdp2"  # CUDA graphs do not follow weights that move
    auto = config.precision.device.type == "cuda"
    compiles = auto if config.torch_compile == "auto" else config.torch_compile == "on"
    policy = load_policy(config, tokenizer, compiles=compiles)
    if processes.rank() == 0 and not sys.stdout.isatty():  # for a log file: there is no report yet
        print("checking the model's log-probs and gradients ...", flush=True)
    with config.precision.autocast():
        require_supported(policy, longest)
    reference = (policy if config.use_peft else frozen_copy(policy)) if config.beta else None
    tags, stop = config.counterfactual().answers.thought_tags, stop_strings(tokenizer, config)
    gap = sampling_gap_limit(config, policy)
    engine: Engine = (
        VllmEngine(policy, tokenizer, config.vllm_server_base_url, gap, tags, stop, config.vllm_weights)
        if config.rollout_engine == "vllm"
        else TransformersEngine(
            policy, tokenizer, config.precision.products if config.precision.is_mixed else None,
            captured=False if moving else None, longest=longest, thought_tags=tags,
            stop=stop,
        )
    )  # fmt: skip
    if play is not None:
        engine = play(engine, tokenizer, end_ids(policy, tokenizer), tags)
    for model in [policy] if reference in (None, policy) else [policy, reference]:
        if compiles:  # before weights are in pieces
            try:
                with config.precision.autocast():
                    compile_layers(model)
            except NotImplementedError as obstacle:
                if config.torch_compile == "on":
                    raise
                _LOG.warning("torch_compile=auto: nothing is compiled: %s", obstacle)
        processes.distribute(model, config)
    if moving:  # as it runs from now on
        with config.precision.autocast():
            require_supported(policy, longest)

    weights = [p for p in policy.parameters() if p.requires_grad]
    fused = config.precision.device.type == "cuda" or None  # elsewhere torch's own choice
    optimizer = torch.optim.AdamW(weights, lr=config.learning_rate, weight_decay=0.0, fused=fused)
    scheduler = get_scheduler(config.lr_scheduler_type, optimizer, 0, config.max_steps)
    return Trainer(
        config, policy, tokenizer, engine, optimizer, scheduler, reference, rewards, rows, prompts, held_out,
        held_out_prompts, grader, shape, examples,
    )  # fmt: skip


def train(trainer: Trainer, folder: RunFolder, ending: Ending | None = None) -> Path:
    """Evaluate, train, evaluate again, save, from the last checkpoint on; give the run folder's path.

    A request of `ending` ends the run after a step. `DiskError`, `FloatingPointError`, `RewardError` and
    `ConnectionError`, of a server or an environment, name the step in their message; any other error has it in a note.
    """
    config, ending = trainer.config, ending or Ending()

    def is_due(every: int | None) -> bool:
        return step in (0, config.max_steps) or (every is not None and step % every == 0)

    ending.waits = True
    start, report_state = folder.begin(trainer)
    per_step = config.generation_batch_size // config.num_generations
    # The order of problems, and what a step draws at random, is a function of the seed: no checkpoint has to hold it.
    batches = itertools.islice(problem_batches(len(trainer.rows), per_step, config.seed), start, None)
    with Report(folder.path, config, trainer.tokenizer, report_state) if processes.rank() == 0 else Silence() as report:
        spare = describe_spare_ids(vocab_size(causal_lm(trainer.policy)), trainer.tokenizer)
        resumes = f"resuming from the checkpoint of step {start}, later ones repeat; --no_resume starts again"
        notes = [*[resumes] * bool(report_state), *trainer.engine.notes, *filter(None, [spare])]
        report.opening(trainer.policy, len(trainer.rows), len(trainer.held_out), notes)
        evaluated, step = {at for at, _ in report_state.get("evaluations", [])}, start
        saved = start if report_state else None
        try:
            for step in range(start, config.max_steps + 1):
                if step > start:
                    report.sampling(step)
                    seed_all(config.seed, step)
                    report.stepped(step, training_step(trainer, step, next(batches)))
                is_new = step > start or not report_state  # its checkpoint has not been kept
                if is_due(config.eval_steps) and step not in evaluated and not asked_to_end(ending):
                    is_new |= evaluate_at(trainer, report, step, ending)
                if config.max_steps == 0:
                    return folder.path
                request = asked_to_end(ending)  # read once: a signal may come between saving and ending
                if is_new and (request or step == start or is_due(config.save_steps)):
                    folder.save(trainer, step, report.state)
                    saved = step
                if request:
                    report.ended(f"ended by {request.name} after step {step}; {folder.how_to_go_on(config)}")
                    return folder.path
            model = folder.path / ("adapter" if config.use_peft else "checkpoint")
            with whole_folder(model) if processes.rank() == 0 else contextlib.nullcontext(model) as aside:
                save_policy(trainer.policy, trainer.tokenizer, aside)
            report.closing()
        except DiskError as problem:
            raise DiskError(f"step {step}: {problem}; {folder.how_to_go_on(config)}") from problem
        except Exception as problem:
            lost = "" if step == saved else "; this step is not saved"
            if isinstance(problem, FloatingPointError | RewardError | ConnectionError):
                raise type(problem)(f"step {step}, {problem}{lost}") from problem
            problem.add_note(f"step {step}{lost}")
            raise
        processes.gather(None)  # the others end when the first has saved
    return folder.path


def asked_to_end(ending: Ending) -> signal.Signals | None:
    """Return the signal that has come to one of the processes; all call this."""
    return next(filter(None, processes.gather(ending.signal)), None)


def seed_all(seed: int, step: int, stream: int = 0) -> None:
    """Seed the global generators, from which a user's rewards may draw, by the run's seed, a step and the process."""
    set_seed(int(np.random.SeedSequence((seed, step, stream, processes.rank())).generate_state(1)[0]))


def evaluate_at(trainer: Trainer, report: Report, step: int, ending: Ending) -> bool:
    """Evaluate after a step; a signal ends that of a single process at once. Returns whether there is a result."""
    config, rows, prompts = trainer.config, trainer.held_out, trainer.held_out_prompts
    seed_all(config.seed, step, 1)
    progress = report.evaluating(step, len(processes.own_share(rows)) * (1 + config.eval_samples))
    try:
        with progress as advance, processes.whole_weights(trainer.policy):
            ending.waits = processes.count() > 1
            result = evaluate(trainer.engine, rows, prompts, config, match=trainer.grader, advance=advance, step=step)
            ending.waits = True
    except Ended:
        return False
    finally:
        ending.waits = True
    report.evaluated(step, result)
    return True


def _say(text: str, stream: TextIO | None = None) -> None:
    if processes.rank() == 0:
        print(text, file=stream or sys.stderr)
