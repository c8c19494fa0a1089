"""Count what a program asks of a GPU by running it on tensors without memory: operations, bytes, launches, visits.

Every operator that reaches the dispatcher is one launch, unless it only looks at memory another way. Its operations
come from torch's registry of formulas, which holds the library's own attention too; its bytes are those of its inputs
and results, each once. What a backward runs counts to the part of the model whose forward made its node.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry

from benchmarks.explain.rates import Rates
from benchmarks.harness.traffic import launches, moved_bytes, nbytes, operator_name
from cfa_kernels.hf.model_walk import ModelWalk

GEMM, ADAPTERS, ATTENTION, CACHE, HEAD, SAMPLER, OTHER = PARTS = (
    "base GEMMs", "adapters", "attention", "keys and values", "head and loss", "sampler", "element-wise",
)  # fmt: skip


class Operator(NamedTuple):
    """An operator by all that its time follows from; equal ones are counted together."""

    section: str
    part: str
    name: str
    flops: float
    moved: float  # bytes
    dtype: torch.dtype


@dataclass
class Counts:
    """What ran, by operator, and on the host: modules visited, and where the host waited for the device."""

    operators: Counter[Operator] = field(default_factory=Counter)
    visits: Counter[str] = field(default_factory=Counter)  # by section
    waits: Counter[str] = field(default_factory=Counter)

    def of(self, section: str, *parts: str) -> Iterator[tuple[Operator, int]]:
        """Yield the operators of a section, of some parts or all, with how often each ran."""
        chosen = parts or PARTS
        return (item for item in self.operators.items() if item[0].section == section and item[0].part in chosen)

    def total(self, quantity: str, section: str, *parts: str) -> float:
        """Sum `flops` or `moved` over operators."""
        return sum(getattr(operator, quantity) * times for operator, times in self.of(section, *parts))

    def launches(self, section: str, *parts: str) -> int:
        """Count launches."""
        return sum(times for _, times in self.of(section, *parts))

    def seconds(self, rates: Rates, section: str, *parts: str) -> float:
        """Sum the rooflines of operators, one after the other as a device runs them."""
        return sum(rates.seconds(o.flops, o.moved, o.dtype, _share(o, rates)) * n for o, n in self.of(section, *parts))

    def needs(self, rates: Rates, section: str, *parts: str) -> tuple[float, float]:
        """Sum the seconds of matrix products, and those of memory, as if neither waited for the other."""
        ran = list(self.of(section, *parts))
        products = sum(rates.products(o.flops, o.dtype, _share(o, rates)) * n for o, n in ran)
        return products, sum(o.moved * n for o, n in ran) / rates.bandwidth


def _share(operator: Operator, rates: Rates) -> float:
    if operator.part != ATTENTION:
        return 1.0
    return rates.attention_backward if "backward" in operator.name else rates.attention


class Tally(TorchDispatchMode):
    """Within it what is dispatched is counted under `section`; `watch` a model to know its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.section = Counts(), ""
        self._inside: list[str] = []
        self._base: set[int] = set()  # memory of weights that adapters leave as they are
        self._experts: set[int] = set()  # memory of weights that hold one matrix for each expert
        self._made_by: dict[int, str] = {}  # part, by the number of an autograd node

    @contextmanager
    def within(self, section: str, part: str | None = None) -> Iterator[None]:
        """Count under `section`, all to one part if it is given."""
        before, self.section = self.section, section
        self._inside += [part] if part else []
        try:
            yield
        finally:
            self.section = before
            if part:
                self._inside.pop()

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Follow which module of `model` runs, and count walks over its modules."""
        adapted = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        own = [weight for module in adapted for weight in module.get_base_layer().parameters(recurse=False)]
        self._base = {_memory(weight) for weight in own}
        experts = [module for module in model.modules() if hasattr(module, "num_experts")]
        weights = [weight for module in experts for weight in module.parameters(recurse=False)]
        self._experts = {_memory(weight) for weight in weights if weight.dim() == 3}
        hooks = [module.register_forward_pre_hook(lambda *_: self._inside.append(ADAPTERS)) for module in adapted]
        hooks += [module.register_forward_hook(lambda *_: self._inside.pop() and None) for module in adapted]
        walk = nn.Module.named_modules

        def counted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.counts.visits[self.section] += 1
            return walk(module, *args, **kwargs)

        def walked(walk_of: ModelWalk, *args: Any) -> None:
            begin(walk_of, *args)
            self.counts.visits[self.section] += len(walk_of.modules)

        begin = ModelWalk.__init__
        try:
            with (
                mock.patch.object(nn.Module, "named_modules", counted),
                mock.patch.object(ModelWalk, "__init__", walked),
            ):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def add(self, name: str, part: str | None, flops: float, moved: float, dtype: torch.dtype) -> None:
        """Count one launch; without a `part`, of the one that runs now."""
        part = self._part(GEMM if flops else OTHER) if part is None else part
        self.counts.operators[Operator(self.section, part, name, flops, moved, dtype)] += 1

    def _part(self, otherwise: str) -> str:
        """Name the part whose module runs, or whose forward made the node that a backward runs."""
        node = torch._C._current_autograd_node()
        if node is not None:
            return self._made_by.get(node._sequence_nr(), otherwise)  # type: ignore[attr-defined]
        part = self._inside[-1] if self._inside else otherwise
        # The node of this operator, if it has one, is the last that was made.
        self._made_by.setdefault(torch._C._autograd._get_sequence_nr() - 1, part)
        return part

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = operator_name(func)
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in tensors):
            if name == "_local_scalar_dense":
                self.counts.waits[self.section] += 1
                return True  # whatever the host asks of values: the usual case
            if torch.device(kwargs.get("device") or "meta").type == "cpu":
                self.counts.waits[self.section] += 1
                return torch.zeros_like(tensors[0], device="cpu", dtype=kwargs.get("dtype"))
        if name == "_grouped_mm":
            return self._product_of_experts(func, args, kwargs)
        found = func(*args, **kwargs)
        results = [leaf for leaf in tree_flatten(found)[0] if isinstance(leaf, Tensor)]
        if not any(tensor.is_meta for tensor in results) or not launches(func):
            return found
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        dtype = (tensors or results)[0].dtype
        if name in HEADS:
            for step, flops, moved in HEADS[name](given):
                self.add(f"{name}: {step}", HEAD, flops, moved, dtype)
            return found
        formula = flop_registry.get(func._overloadpacket)
        flops = 0.0 if formula is None else float(formula(*args, **kwargs, out_val=found))
        if func.namespace == "cfa_kernels":
            part = ATTENTION if name.startswith("tree_attention") else HEAD
        elif any(_memory(tensor) in (self._base if flops else self._experts) for tensor in tensors):
            part = GEMM
        elif _is_cache(name, given, results):
            part = CACHE
        else:
            part = self._part(GEMM if flops else OTHER)
            part = OTHER if part == GEMM and not flops else part
        self.add(name, part, flops, float(moved_bytes(func, args, kwargs, found)), dtype)
        return found

    def _product_of_experts(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """Count rows, sorted by expert, times one matrix of each expert, or the gradient of either.

        Rows are taken to spread evenly: as many experts are read as there are rows, at most all. In bfloat16 it is one
        kernel; in float32 torch waits for how many rows each expert has and runs a product for each.
        """
        first, second = args[:2]
        halves = [x.to(torch.bfloat16) for x in (first, second)]  # the only dtype that runs without memory
        found: Tensor = func(*halves, *args[2:], **kwargs).to(first.dtype)
        experts = next(len(x) for x in (first, second, found) if x.dim() == 3)
        rows = len(first) if second.dim() == 3 else second.shape[1] if first.dim() == 3 else len(second)
        read = min(rows, experts)
        flops = 2.0 * first.shape[-2] * first.shape[-1] * second.shape[-1]
        moved = sum(nbytes([x]) * (read / experts if x.dim() == 3 else 1) for x in (first, second, found))
        products = 1 if first.dtype == torch.bfloat16 else read
        self.counts.waits[self.section] += products > 1
        for _ in range(products):
            self.add("_grouped_mm", GEMM, flops / products, moved / products, first.dtype)
        return found


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_cache(name: str, given: dict[str, Any], results: list[Tensor]) -> bool:
    """Whether an operator copies keys or values: behind others, into a cache, or once for each query head."""
    if name == "cat":
        return results[0].dim() == 4 and given.get("dim", 0) in (2, -2)
    return name == "index_copy_" or (name == "clone" and results[0].dim() == 5)


def _policy_loss(given: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Count `linear_policy_loss`: strips of logits by a product, a pass over their rows, a product for each gradient.

    A strip is written once as the product's sums, read twice from memory (the statistics of a row, then its gradient),
    and its gradient is written in the head's dtype and read by each product. Strips of whole sequences run twice.
    """
    hidden, head = given["hidden"], given["head"]
    rows = given["targets"].numel() if given["rows"] is None else len(given["rows"])
    gradients, again = sum(given["wanted"][:2]), 1 + (given["level"] == "sequence")
    one, strips = 2.0 * rows * head.numel(), -(-rows // given["chunk_size"])
    logits, wide, narrow = rows * len(head), 4 if given["fp32_logits"] else hidden.element_size(), head.element_size()
    weights = strips * head.numel() * narrow
    return [
        ("products", one * (again + gradients), (again + gradients) * weights + logits * (wide + gradients * narrow)),
        ("rows", 0.0, logits * (wide * (1 + again) + (narrow if gradients else 0))),
    ]


def _logprob(given: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Count `linear_logprob`: one product whose tiles of logits stay on the chip."""
    hidden, head = given["hidden"], given["lm_head"]
    return [("products", 2.0 * len(hidden) * head.numel(), float(nbytes([hidden, head])))]


HEADS: dict[str, Callable[[dict[str, Any]], list[tuple[str, float, float]]]] = {
    "linear_policy_loss": _policy_loss,
    "linear_logprob": _logprob,
}
"""By operator, from its arguments: each step with its operations and bytes."""
