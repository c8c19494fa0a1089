"""Run work inside one call of the module that distributes a model among processes.

Weights of a sharded model (FSDP, ZeRO-3) are whole only while its outermost module runs. So a whole unit of work is the
body of ONE call of it, for which the causal model's `forward` runs the body. `ranks.py` keeps the processes in step.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from ..tree.packs import idle_pack
from .check.verify import check_supported, check_trainable
from .modes import exchanged, value_of
from .parts import backbone, causal_lm, wrappers
from .sharded.fsdp import (
    give_back,
    head_whole,
    is_engine,
    is_fsdp1,
    is_fsdp2,
    is_piece,
    is_zero3,
    prepare_zero3,
    sharding_group,
)
from .sharded.ranks import INSIDE, HeldForward, PeerFailed, Ranks, Replicas, inside
from .tree_forward import packed_hidden, tree_attention_mode
from .walk import ModelWalk

_Result = TypeVar("_Result")


def run_inside(model: nn.Module, body: Callable[[], _Result], *, trains: bool = False, check: Any = None) -> _Result:
    """Run `body()` as the forward of the module that distributes `model`; by itself if nothing does.

    Everything that reads weights belongs into one body. Call `backward` on its result, outside. All processes that
    share a model must call this, each with its own work or none, and must all call `backward` if one does; one that
    raises makes all raise.

    Args:
        model: a transformers causal model, or a wrapper of one: PEFT, DDP, FSDP (both kinds) or DeepSpeed's ZeRO-3.
        body: returns a result whose tensors may be in tuples, lists and dictionaries.
        trains: whether it makes gradients of the weights.
        check: called with a `ModelWalk` that processes share, in place of `check_trainable` or `check_supported`.

    Raises:
        NotImplementedError: a way of sharding that this cannot run through, or a model that fails its check.
        Exception: that of `body`; on the other processes one of its type with the rank in its text.
    """
    causal = causal_lm(model)
    if inside(causal) is not None:
        return body()
    root = _root(model, causal)
    if root is None:
        return body()
    if not is_sharded(root):  # DDP, and DeepSpeed's engine below stage 3
        return _through(root, causal, Replicas(causal), body) if trains and torch.is_grad_enabled() else body()
    with torch.set_grad_enabled(trains and torch.is_grad_enabled()):
        return _in_step(root, causal, body, check or (check_trainable if trains else check_supported))


def is_sharded(model: nn.Module) -> bool:
    """Whether processes hold pieces of the weights of `model` (FSDP, ZeRO-3), so that all must take part."""
    try:
        return any(kind(module) for module in wrappers(model) for kind in (is_fsdp1, is_fsdp2, is_zero3))
    except TypeError:  # no model of transformers, as its next use will say
        return False


def _root(model: nn.Module, causal: PreTrainedModel) -> Any:
    for module in wrappers(model):
        if isinstance(module, DistributedDataParallel) or is_fsdp1(module) or is_fsdp2(module) or is_engine(module):
            return module
    if any(map(is_piece, causal.get_input_embeddings().parameters())):
        raise NotImplementedError(
            f"model: the weights of {type(model).__name__} are pieces, and nothing that wraps it gathers them (nor can "
            "tensor parallelism be); pass the module that fully_shard was called on last, or DeepSpeed's engine"
        )
    return None


def _through(root: nn.Module, causal: PreTrainedModel, ranks: Ranks | Replicas, body: Callable[[], _Result]) -> _Result:
    with ExitStack() as stack:

        @torch.compiler.disable  # else torch would trace the body where it compiles a model as a whole, as TRL does
        def redirected(*_: object, **__: object) -> _Result:
            stack.close()
            with value_of(INSIDE, ranks):
                return body()

        stack.enter_context(exchanged([(causal, {"forward": redirected})]))
        return root(input_ids=None)  # type: ignore[no-any-return]


def _in_step(
    root: Any, causal: PreTrainedModel, body: Callable[[], _Result], check: Callable[[ModelWalk], object]
) -> _Result:
    walk, results, failed = ModelWalk.of(causal), list[_Result](), False
    problem: Exception | None = None

    def idle() -> None:
        with value_of(INSIDE, None), tree_attention_mode(walk):  # the processes have met already
            packed_hidden(walk, idle_pack())

    ranks = Ranks(causal, sharding_group(root), idle)

    def whole() -> tuple[Tensor, ...]:
        nonlocal problem, failed
        with head_whole(root, causal), _errors_held(causal, gathers=is_zero3(root)):
            try:
                if ranks.differ(torch.is_grad_enabled()):
                    raise ValueError("processes that share a model must make the same call: one only takes gradients")
                check(walk)
                ranks.checked = True
                results.append(body())
            except PeerFailed:
                failed = True
            except Exception as error:
                problem, failed = error, True
            failed, while_idle = ranks.finish(failed)
            problem = problem or while_idle
            # A backward may start from these: FSDP and DDP put their hooks on them.
            outputs = () if failed else tuple(filter(_needs_backward, tree_leaves(results)))
            if not failed and torch.is_grad_enabled() and ranks.differ(bool(outputs)):
                failed = True
                if not outputs:
                    what = "this process has no row to call backward on, and others have"
                    problem = ValueError(f"{what}; give it one (packed_policy_loss takes a row without advantage)")
        return () if failed else outputs

    prepare_zero3(root, causal)
    outputs = _through(root, causal, ranks, whole)
    if failed or not outputs:
        give_back(root)
    if failed:
        results.clear()
        ranks.agree(problem)
    if is_zero3(root):  # it has wrapped the outputs
        left = iter(outputs)
        results = tree_map(lambda leaf: next(left) if _needs_backward(leaf) else leaf, results)
    return results[0]


def _needs_backward(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


@contextmanager
def _errors_held(causal: PreTrainedModel, *, gathers: bool) -> Iterator[None]:
    """Let a forward end in which a layer fails, and raise its error then: every layer's weights have been gathered."""
    body, errors = backbone(causal), list[Exception]()

    def release(*_: object) -> None:
        if errors:
            raise errors.pop()

    layers = [_innermost(layer) for layer in getattr(body, "layers", None) or ()]
    # `_original_forward`, as accelerate has it: a layer so wrapped is no other model (`walk.own_forward`).
    own = [(layer, layer.forward, vars(layer).get("_original_forward", layer.forward)) for layer in layers]
    wrapped = (
        (layer, {"forward": HeldForward(run, errors, layer if gathers else None), "_original_forward": first})
        for layer, run, first in own
    )
    with exchanged(wrapped), body.register_forward_hook(release):
        yield


def _innermost(layer: nn.Module) -> nn.Module:
    parts = layer._modules
    inner = parts.get("_fsdp_wrapped_module") or parts.get("_checkpoint_wrapped_module")
    return layer if inner is None else _innermost(inner)
