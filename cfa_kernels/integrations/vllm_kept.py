"""Read the ids that vLLM kept at each token off the log-probs that it lists, also in TRL's vLLM path.

Under `processed_logprobs` an id that top-p, top-k or min-p cut off is listed with -9999. With `top_k` in the request as
large as `logprobs` the list of the others is complete.
"""

import math
from collections.abc import Sequence
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list

from ..ops.kept_tokens import KeptTokens

_LOG = get_logger(__name__)
MOST_KEPT = 256
"""Ids of a token that are asked for; their list is 6 kB of JSON."""
_CUT = -9000.0


def ids_listed(max_logprobs: int) -> int:
    """Return how many ids of a token vLLM can list under its option `max_logprobs`, at most `MOST_KEPT`."""
    return MOST_KEPT if max_logprobs < 0 else min(MOST_KEPT, max_logprobs)


def read_lists(
    sampled: Sequence[int], ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float | None]]
) -> tuple[list[float], KeptTokens]:
    """Return the log-probs of T sampled ids, and the ids kept at each of them, from T lists; None is JSON's nan.

    Raises `LookupError` if a sampled id is not in its list.
    """
    rows = [dict(zip(*pair, strict=True)) for pair in zip(ids, logprobs, strict=True)]
    kept = [{i: value for i, value in row.items() if value is not None and value > _CUT} for row in rows]
    drawn = [math.nan if (own := row[token]) is None else own for token, row in zip(sampled, rows, strict=True)]
    return drawn, KeptTokens.of([[*row] for row in kept], [[*row.values()] for row in kept])


def record_kept_ids(trainer: Any) -> None:
    """Let the vLLM of a trainer of TRL list the ids that it keeps, and leave them in `trainer._sampling_mask`."""
    generation, most = trainer.vllm_generation, list[int | None]([None])
    if trainer.accelerator.is_main_process or generation.mode != "server":
        in_process = generation.mode != "server"
        config = generation.llm.llm_engine.model_config if in_process else None
        served = vars(config) if config else generation.vllm_client.get_server_info()["model_config"]
        most = [ids_listed(served["max_logprobs"]) if served["logprobs_mode"] == "processed_logprobs" else None]
    if generation.mode == "server":
        broadcast_object_list(most, from_process=0)
    reason = "it does not give processed_logprobs" if most[0] is None else None
    reason = f"beta={trainer.beta}: the reference is over the whole vocabulary" if trainer.beta else reason
    reason = "tools continue a completion" if getattr(trainer, "tools", None) else reason
    if reason is not None or most[0] is None:
        _LOG.warning(f"packed_loss=True: the loss is not over the ids that vLLM kept: {reason}")
        return
    if most[0] < MOST_KEPT:
        _LOG.warning(f"packed_loss=True: vLLM keeps {most[0]} ids or fewer; a server with --max-logprobs lists more")
    own, generation.logprobs = generation.generate, most[0]
    generation.top_k = min(generation.top_k, most[0]) if (generation.top_k or 0) > 0 else most[0]  # -1 is off

    def generate(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        prompt_ids, sampled, logprobs, ids = own(*args, **kwargs)
        drawn, kept = zip(*map(read_lists, sampled, ids, logprobs), strict=True)
        trainer._sampling_mask = [*kept]
        values, names = ([[[one] for one in row] for row in rows] for rows in (drawn, sampled))
        return prompt_ids, sampled, values, names  # TRL reads the first of each list

    generation.generate = generate
