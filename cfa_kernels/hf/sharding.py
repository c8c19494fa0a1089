"""Run work inside one call of the module that distributes a model among processes.

Weights of a sharded model (FSDP, ZeRO-3) are whole only while its outermost module runs. So a whole unit of work, the
check of the model, all packs, the head, the loss, is the body of ONE call of that module: for that call the causal
model's `forward` is replaced by one that runs the body. `ranks.py` keeps the processes in step meanwhile.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers import PreTrainedModel

from ..packing.packs import idle_pack
from .fsdp import (
    gathered_zero3,
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
from .model import backbone, causal_lm, wrappers
from .model_walk import ModelWalk
from .modes import exchanged, value_of
from .ranks import INSIDE, OtherProcessFailed, Ranks, Replicas, inside
from .tree_forward import packed_hidden, tree_attention_mode
from .verify import check_supported, check_trainable

_Result = TypeVar("_Result")


def run_inside(model: nn.Module, body: Callable[[], _Result], *, trains: bool = False) -> _Result:
    """Run `body()` as the forward of the module that distributes `model`; by itself where nothing does.

    Everything that reads weights belongs into one body: scores, log-probs, the loss, and what an estimator asks. Call
    `backward` on what it returns, outside. Where the model is sharded all processes must call this, each with work of
    its own or none, and those that have gradients must all call `backward`; one that raises makes all raise.

    Args:
        model: a transformers causal model, or what wraps one: PEFT, DDP, FSDP (both kinds) or DeepSpeed's ZeRO-3.
        body: returns a result whose tensors may be in tuples, lists and dictionaries.
        trains: whether it makes gradients of the weights.

    Raises:
        NotImplementedError: a way of sharding that this cannot run through, or a model that cannot be checked.
        Exception: what `body` raises; on the other processes an error of that type with the rank in its text.
    """
    causal = causal_lm(model)
    if inside(causal) is not None:
        return body()
    root = _root(model, causal)
    if root is None:
        return body()
    if not is_sharded(root):  # DDP, and DeepSpeed's engine below stage 3
        return _through(root, causal, _within(Replicas(causal), body)) if trains and torch.is_grad_enabled() else body()
    with torch.set_grad_enabled(trains and torch.is_grad_enabled()):
        return _in_step(root, causal, body, check_trainable if trains else check_supported)


def is_sharded(model: nn.Module) -> bool:
    """Whether processes hold pieces of the weights of `model` (FSDP, ZeRO-3), so that all must take part."""
    try:
        return any(kind(module) for module in wrappers(model) for kind in (is_fsdp1, is_fsdp2, is_zero3))
    except TypeError:  # no model of transformers; what asks it says so
        return False


def _root(model: nn.Module, causal: PreTrainedModel) -> Any:
    """Find the outermost module that distributes `model` among processes; None where it is in this one only."""
    for module in wrappers(model):
        if isinstance(module, DistributedDataParallel) or is_fsdp1(module) or is_fsdp2(module) or is_engine(module):
            return module
    if any(map(is_piece, causal.get_input_embeddings().parameters())):
        raise NotImplementedError(
            f"model: the weights of {type(model).__name__} are pieces, and nothing that wraps it gathers them; pass "
            "the module that fully_shard was called on last, or DeepSpeed's engine. Tensor parallelism is not supported"
        )
    return None


def _through(root: nn.Module, causal: PreTrainedModel, body: Callable[[], _Result]) -> _Result:
    """Call `root` with `body` for the forward of `causal`, which is put back before the body runs."""
    with ExitStack() as stack:

        def redirected(*_: object, **__: object) -> _Result:
            stack.close()
            return body()

        stack.enter_context(exchanged([(causal, {"forward": redirected})]))
        return root(input_ids=None)  # type: ignore[no-any-return]


def _within(ranks: Ranks | Replicas, body: Callable[[], _Result]) -> Callable[[], _Result]:
    def run() -> _Result:
        with value_of(INSIDE, ranks):
            return body()

    return run


def _in_step(
    root: Any, causal: PreTrainedModel, body: Callable[[], _Result], check: Callable[[ModelWalk], object]
) -> _Result:
    """Check the model and run `body` inside `root`, with all processes in step; raise on all what one raises."""
    walk = ModelWalk.of(causal)
    found: list[_Result] = []
    problem: Exception | None = None
    failed = False

    def idle() -> None:
        with tree_attention_mode(walk):
            packed_hidden(walk, idle_pack(), idle=True)

    ranks = Ranks(causal, sharding_group(root), idle)

    def whole() -> tuple[Tensor, ...]:
        nonlocal problem, failed
        with head_whole(root, causal), _errors_held(causal, gathers=is_zero3(root)):
            try:
                ranks.require_same(_described(causal))
                check(walk)
                found.append(body())
            except OtherProcessFailed:
                failed = True
            except Exception as error:
                problem, failed = error, True
            failed, while_idle = ranks.finish(failed)
            problem = problem or while_idle
            outputs = () if failed else _with_gradient(found)
            if not failed and torch.is_grad_enabled() and ranks.differ(bool(outputs)):
                problem, failed = None if outputs else ValueError(_NO_GRADIENT), True
        return () if failed else outputs

    prepare_zero3(root, causal)
    outputs = _through(root, causal, _within(ranks, whole))
    if failed or not outputs:
        give_back(root)
    if failed:
        found.clear()
        ranks.agree(problem)
    return _replaced(found, outputs)[0] if is_zero3(root) else found[0]


def _described(causal: PreTrainedModel) -> str:
    """Describe what processes that share a model must have in common: its sizes, and whether this call trains."""
    sizes = causal.config.get_text_config()
    shown = [f"{name}={getattr(sizes, name, None)}" for name in ("vocab_size", "num_hidden_layers", "hidden_size")]
    gradients = f"{'with' if torch.is_grad_enabled() else 'without'} gradients"
    return ", ".join([type(causal).__name__.removeprefix("FSDP"), *shown, gradients])


_NO_GRADIENT = (
    "this process has no row to call backward on, and others have; where processes share a model, every one needs a "
    "row (packed_policy_loss takes one without advantage)"
)


def _with_gradient(found: list[Any]) -> tuple[Tensor, ...]:
    """Pick the tensors of a result that a backward may start from: what shares the model puts its hooks on them."""
    return tuple(leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor) and leaf.requires_grad)


def _replaced(found: list[Any], outputs: Sequence[Tensor]) -> list[Any]:
    """Put `outputs` in the place of the tensors `_with_gradient`: DeepSpeed wraps what its call returns."""
    given = iter(outputs)
    leaves, shape = tree_flatten(found)
    return tree_unflatten(  # type: ignore[no-any-return]
        [next(given) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf for leaf in leaves], shape
    )


@contextmanager
def _errors_held(causal: PreTrainedModel, *, gathers: bool) -> Iterator[None]:
    """Let a forward end in which a layer fails, and raise its error then: every layer's weights have been gathered.

    The layer that fails, and those above it, give back what they were given. Layers are `layers` of the backbone; an
    error elsewhere, or in a model that names them otherwise, is raised where it is. With `gathers` a layer's weights
    are gathered before it runs, since what shares them would do so for each of its parts, of which one may fail.
    """
    body = backbone(causal)
    layers = getattr(body, "layers", None)
    modules = [_innermost(layer) for layer in layers or ()]
    held = _HeldErrors(gathers, {module: module.forward for module in modules})
    with (
        exchanged((module, {"forward": MethodType(_held, module)}) for module in modules),
        value_of(_HELD, held),
        body.register_forward_hook(lambda *_: held.release()),
    ):
        yield


def _innermost(layer: nn.Module) -> nn.Module:
    """Find a layer inside what FSDP and torch's checkpointing wrap around it."""
    parts = layer._modules
    inner = parts.get("_fsdp_wrapped_module") or parts.get("_checkpoint_wrapped_module")
    return layer if inner is None else _innermost(inner)


class _HeldErrors:
    """The first error of a layer in the forward under way."""

    def __init__(self, gathers: bool, forwards: dict[nn.Module, Callable[..., Any]]) -> None:
        self.gathers, self.forwards = gathers, forwards
        self.error: Exception | None = None

    def release(self) -> None:
        """Raise it, once."""
        error, self.error = self.error, None
        if error is not None:
            raise error


_HELD: ContextVar[_HeldErrors | None] = ContextVar("cfa_held", default=None)


def _held(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the own forward of a layer, or give back what it was given once a layer has failed.

    One function for all layers and calls, so that `ModelWalk.forwards` sees no change from call to call.
    """
    held = _HELD.get()
    assert held is not None
    with ExitStack() as gathered:
        if held.gathers:
            gathered_zero3(module.modules(), gathered)
        try:
            if held.error is None:
                return held.forwards[module](*args, **kwargs)
        except Exception as error:
            held.error = error
    return args[0] if args else kwargs["hidden_states"]
