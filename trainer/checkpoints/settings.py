"""Declare the settings of checkpoints; they are flags and YAML names of the training program like all others."""

from dataclasses import dataclass

MAY_CHANGE = frozenset({
    "output_dir", "resume", "save_steps", "save_total_limit", "eval_steps", "report_to", "log_completions",
    "no_advantage_patience", "device", "parallel", "ddp_timeout", "vllm_server_base_url", "vllm_group_port",
    "vllm_server_timeout",
})  # fmt: skip
"""Settings that a run may go on with changed: where it runs and writes, and how often it saves, tests and logs."""
STEADY_SCHEDULES = ("constant", "constant_with_warmup")
"""Schedules under which a step's learning rate does not depend on `max_steps`, so that this may change too."""


@dataclass
class RunSettings:
    """How a run is kept, and how it goes on after it was stopped."""

    save_steps: int = 10
    """Keep a checkpoint to go on from every so many steps, beside those at the beginning and the end."""
    save_total_limit: int = 2
    """How many checkpoints are kept, the newest ones; a damaged one is replaced by the one before it."""
    resume: bool = True
    """The same command again goes on from the last good checkpoint: of its output_dir, or by default of the newest
    unfinished run under runs/ that was begun with the same settings. --no_resume starts anew, in a new folder."""
