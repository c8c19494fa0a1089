"""Name the settings of a trainer of TRL that credit and the packed loss cannot be combined with."""

import inspect
from typing import Any

from accelerate.utils import DistributedType
from packaging.version import Version

from ..estimators.base import SIBLINGS
from ..loss.types import LEVELS, LOSS_TYPES, weights_sequences
from . import require
from .credit import OFFERS, ONE_RATIO, obstacles, unmet_needs

OLDEST = "1.0.0"
TRL = require("trl", OLDEST)

from trl import GRPOTrainer  # noqa: E402  the check above says more than a failing import would

# From here on luspo leaves the padding of (B, T) advantages out, and all losses are normalised as in 1.16.
_LOSSES_OF_TODAY = Version("1.10.0")

# From here on TRL corrects for vLLM's log-probs being normalised over what top_p, top_k and min_p leave.
_REPLAYS = Version("1.17.0")

_OF_TRL = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")

_AT_SEQUENCES = f"importance_sampling_level='sequence': {ONE_RATIO}; use importance_sampling_level='token'"
_WHOLE = "layers, sequences and the head must be whole; use DDP, FSDP or DeepSpeed"

# Each process holds the whole model, or what wraps it gathers its weights in a forward.
_RUNS = {DistributedType.NO, DistributedType.DEEPSPEED, DistributedType.FSDP} | {
    kind for kind in DistributedType if kind.name.startswith("MULTI_")
}


def credit_obstacles(trainer: Any) -> list[str]:
    """Name what a trainer's credit cannot be combined with."""
    config, args, processes = trainer.credit, trainer.args, trainer.accelerator.num_processes
    rows, group = args.per_device_train_batch_size * args.steps_per_generation, trainer.num_generations
    zero = getattr(getattr(trainer.accelerator.state, "deepspeed_plugin", None), "zero_stage", 0)
    is_sharded_in_training = trainer.accelerator.distributed_type == DistributedType.FSDP or zero == 3
    is_gmpo = any(base.__name__ == "GMPOTrainer" for base in type(trainer).__mro__)
    return [
        *unmet_needs(config, OFFERS["TRL, FSDP" if is_sharded_in_training else "TRL"]),
        *obstacles(
            (
                trainer.loss_type == "luspo" and TRL < _LOSSES_OF_TODAY,
                f"loss_type='luspo' in TRL {TRL}: it counts padding once advantages are per token; TRL 1.10 does not",
            ),
            (is_gmpo, "GMPOTrainer: its loss takes one advantage per sequence"),
            (weights_sequences(trainer.loss_type, trainer.importance_sampling_level), _AT_SEQUENCES),
            (
                SIBLINGS in config.needs and processes > 1 and rows % group,
                f"{config.part_that_needs(SIBLINGS)} on {processes} processes of {rows} completions: groups of "
                f"{group} are split between them; give each process whole groups",
            ),
        ),
        *_obstacles_of_both(trainer),
    ]


def cuts(args: Any) -> list[str]:
    """Name the settings that cut the distribution off that is sampled from."""
    settings = {name: getattr(args, name, None) for name in ("top_p", "top_k", "min_p")}
    return [f"{name}={value}" for name, value in settings.items() if value not in (None, -1, 0, 1)]


def packing_obstacles(trainer: Any) -> list[str]:
    """Name what its packed loss cannot be combined with."""
    args = trainer.args
    mode = getattr(args, "vllm_importance_sampling_mode", "") if args.use_vllm else ""
    weighs_sequences = weights_sequences(trainer.loss_type, trainer.importance_sampling_level)
    cut = cuts(args)
    asked = {"repetition_penalty": args.repetition_penalty} | (args.generation_kwargs or {})
    penalties = [f"{name}={value}" for name, value in asked.items() if "penalty" in name and value not in (0, 1)]
    own = {
        "loss": "_compute_loss", "log-probs": "_get_per_token_logps_and_entropies",
        "off-policy mask": "get_off_policy_mask", "factors of vespo": "get_gamma_weights",
    }  # fmt: skip
    cases = (
        (TRL < _LOSSES_OF_TODAY, f"TRL {TRL}: it normalises losses in another way than TRL 1.10 and later"),
        (
            trainer.loss_type not in _OF_TRL,
            f"loss_type={trainer.loss_type!r}: it is not one of {', '.join(_OF_TRL)}",
        ),
        (
            trainer.importance_sampling_level not in getattr(LOSS_TYPES.get(trainer.loss_type), "levels", LEVELS),
            f"importance_sampling_level={trainer.importance_sampling_level!r} with loss_type={trainer.loss_type!r}",
        ),
        *(
            (
                not _is_trls(trainer, name),
                f"{type(trainer).__name__}: it has its own {what} ({name}), which would not run",
            )
            for what, name in own.items()
        ),
        (mode.startswith("token") and weighs_sequences, f"vllm_importance_sampling_mode={mode!r} with {_AT_SEQUENCES}"),
        (
            TRL >= _REPLAYS and args.use_vllm and cut and getattr(trainer, "rollout_func", None) is None,
            f"{', '.join(cut)} in TRL {TRL}: its correction for cut distributions would not run, and ours needs "
            "the sampling_mask of a rollout_func; set them to 1, 0 and None",
        ),
        (
            args.use_vllm and cut and penalties,
            f"{', '.join(penalties)} with {', '.join(cut)}: a penalty changes the scores of the ids that vLLM keeps, "
            "over which the loss is normalised; omit it, or the others",
        ),
        (
            args.neftune_noise_alpha,
            f"neftune_noise_alpha={args.neftune_noise_alpha}: completions would share a prompt's noise; omit it",
        ),
    )
    return [*obstacles(*cases), *_obstacles_of_both(trainer)]


def _is_trls(trainer: Any, name: str) -> bool:
    """Whether a method that the packed loss takes the place of is TRL's own; a subclass may add to the packed loss."""
    order = [cls for cls in type(trainer).__mro__ if name in vars(cls)]
    ours = [cls.__module__.startswith(__package__) for cls in order]
    after = order[ours.index(True) :] if name == "_compute_loss" else order
    owners = [cls for cls in after if not cls.__module__.startswith(__package__)]
    method, modules = inspect.getattr_static(GRPOTrainer, name, None), []
    code = getattr(method, "__func__", method)
    while code is not None:  # TRL's function inside decorators of its own and of torch's; a patch is neither
        modules.append(getattr(code, "__globals__", {}).get("__name__", "").partition(".")[0])
        code = getattr(code, "__wrapped__", None)
    return not owners or (owners == [GRPOTrainer] and {*modules} <= {"trl", "torch"})


def _obstacles_of_both(trainer: Any) -> list[str]:
    kind, parallelism = trainer.accelerator.distributed_type, getattr(trainer.accelerator, "parallelism_config", None)
    splits = {f"{name} parallelism": getattr(parallelism, f"{name}_enabled", False) for name in ("tp", "cp", "sp")}
    columns = getattr(trainer.train_dataset, "column_names", None) or ()
    has_ligers_loss = getattr(trainer, "use_liger_kernel", False) and hasattr(trainer, "compute_liger_loss")
    return obstacles(
        (has_ligers_loss, f"use_liger_kernel=True in TRL {TRL}: its loss is Liger's; take TRL 1.14"),
        *((holds, f"{how}: {_WHOLE}") for how, holds in ({str(kind): kind not in _RUNS} | splits).items()),
        ({"image", "images"} & set(columns), "images in the dataset"),
    )
