"""`python -m benchmarks launches`: count what a compiled layer and a token launch and move on a GPU; none is needed.

The library's packed forward, its backward and its scores run on a CPU as on a GPU: bfloat16 rows, float32 adapters as
one operator, attention as another. Inductor schedules the graphs of a layer as for an H100, which are counted, not run:
all are zeros. An H200's profile had the same number, and kernels that sum a product's parts within cuBLAS.

Sampling's decoder runs on a CPU, too, without its products and attention. Its layers count as the graph of a token;
outside of them each operator that writes memory is a launch, and moves what it reads and writes.
"""

import copy
import functools
import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._inductor.scheduler
import torch.utils._triton
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch._inductor import compile_fx
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AutoModelForCausalLM

from benchmarks.harness.results import table
from benchmarks.harness.workloads import MODELS
from cfa_kernels import Batch, Rows, Span, packed_forward
from cfa_kernels.model import lora
from cfa_kernels.model.compiled import CompiledKind
from cfa_kernels.model.head import read_head
from cfa_kernels.model.parts import causal_lm
from cfa_kernels.ops import adapted_linear, matmul
from cfa_kernels.scoring import masked, packed
from trainer.rollouts import decoding

MODEL, PASSES = "Qwen3-1.7B", ("forward", "backward", "scoring", "scoring, merged")
PROBLEMS, GROUP, PROMPT, COMPLETION, SPANS = 4, 8, 110, 220, 6
DECODED, PROMPTS = 8, (128, 2_048)  # prompts of GROUP completions each, and their tokens
ATTENTION = {  # kernels on an H100
    "cfa_kernels.tree_attention.default": 1, "cfa_kernels.tree_attention_backward.default": 3,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": 1,
}  # fmt: skip


@torch.library.custom_op("cfa_kernels::wide_mm", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def wide_mm(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Stand in for a product with wider sums, which a CPU does not have; of zeros."""
    return left.new_zeros(left.shape[0], right.shape[1], dtype=dtype)


wide_mm.register_fake(lambda left, right, dtype: left.new_empty(left.shape[0], right.shape[1], dtype=dtype))
H100 = SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, warp_size=32, regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, shared_memory_per_block=49_152,
    shared_memory_per_block_optin=232_448, gcnArchName="",
)  # fmt: skip


def as_with_a_gpu() -> ExitStack:
    """Let inductor's scheduler find an H100 inside."""
    stack = ExitStack()
    found: dict[str, Any] = {"is_available": True, "current_device": 0, "device_count": 1, "_lazy_init": None}
    found |= {"get_device_capability": (H100.major, H100.minor)}
    found |= dict.fromkeys(("get_device_properties", "_get_device_properties"), H100)
    for name, value in found.items():
        stack.enter_context(mock.patch.object(torch.cuda, name, create=True, return_value=value))
    for module in (torch._inductor.scheduler, torch.utils._triton):
        stack.enter_context(mock.patch.object(module, "has_triton", return_value=True))
    return stack


def count_nodes(nodes: Sequence[Any]) -> Counter[str]:
    """Count a schedule's products, kernels of attention, fused kernels, and the bytes that these last move."""
    count: Counter[str] = Counter()
    for node in nodes:
        name = str(getattr(node.node, "op_overload", None) or getattr(node.node, "python_kernel_name", ""))
        if name in ATTENTION:
            count["attention"] += ATTENTION[name]
        elif "mm" in name:
            count["products"] += 1
        elif type(node.node).__name__ != "MultiOutput" and type(node).__name__ != "NopKernelSchedulerNode":
            count["fused"] += 1
            whole, *parts = (one.get_read_write_buffer_accesses(True, True) for one in (node, *node.get_nodes()))
            # Of a buffer of which one of the parts reads or writes some rows, the parts know how many.
            count["moved"] += sum(min(size, sum(part.get(name, 0) for part in parts)) for name, size in whole.items())
    return count


def counting(counts: dict[str, Counter[str]], graph: Any, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Stand in for inductor's inner compiler: schedule a graph, count that, return zeros in its place."""
    backward, inference = options.get("is_backward", False), options.get("is_inference", False)
    outs = [out.meta["val"] if isinstance(out, torch.fx.Node) else out for out in graph.graph.output_node().args[0]]
    fake: Any = torch._guards.detect_fake_mode(inputs)
    compile_fx.record_original_output_strides(graph)

    def there(value: Any) -> Any:
        if isinstance(value, Tensor):
            with fake:
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda:0")
        return torch.device("cuda:0") if isinstance(value, torch.device) else value

    with V.set_fake_mode(fake), torch.no_grad(), DebugContext():
        compile_fx.view_to_reshape(graph)
        compile_fx.fake_tensor_prop(graph, inputs)
        compile_fx._recursive_post_grad_passes(graph, inference)
        for node in graph.graph.nodes:
            node.kwargs, node.meta["val"] = tree_map(there, node.kwargs), tree_map(there, node.meta.get("val"))
        given = [there(one) for one in inputs]
        lowered = GraphLowering(graph, given, fake.shape_env, is_backward=backward, is_inference=inference)
        with as_with_a_gpu(), V.set_graph_handler(lowered), V.set_extern_kernel_nodes([]):
            lowered.run(*given)
            lowered._update_scheduler()
            counts[PASSES[1 if backward else 2 * inference]] = count_nodes(lowered.scheduler.nodes)

    def run(args: list[Any]) -> list[Any]:
        sizes = dict[Any, int]()  # of this pack
        for known, given in zip(inputs, args, strict=True):
            pairs = zip(known.shape, given.shape, strict=True) if isinstance(known, Tensor) else [(known, given)]
            sizes |= {one.node.expr: int(size) for one, size in pairs if isinstance(one, torch.SymInt)}
        args.clear()

        def value(x: Any) -> Any:
            if isinstance(x, Tensor):
                return torch.empty_strided([*map(value, x.shape)], [*map(value, x.stride())], dtype=x.dtype).zero_()
            return int(x.node.expr.subs(sizes)) if isinstance(x, torch.SymInt) else x

        return [*map(value, outs)]

    run._boxed_call = True
    return run


def count_layer() -> dict[str, Counter[str]]:
    """Count each of `PASSES` through a layer with LoRA of rank 32; `RuntimeError` where it does not compile."""
    config, counts = copy.deepcopy(MODELS[MODEL]), dict[str, Counter[str]]()
    config.num_hidden_layers, config.vocab_size, config.layer_types = 2, 256, config.layer_types[:2]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = get_peft_model(model, LoraConfig(r=32, target_modules="all-linear")).to_empty(device="cpu").train()
    torch._foreach_zero_([tensor.data for tensor in (*model.parameters(), *model.buffers())])
    prompts = [torch.full((PROMPT,), i) for i in range(PROBLEMS) for _ in range(GROUP)]
    completions = [torch.arange(i, i + COMPLETION) % 256 for i in range(PROBLEMS * GROUP)]
    spans = [Span(k * (COMPLETION - 4) // SPANS, k * (COMPLETION - 4) // SPANS + 12) for k in range(SPANS)]
    inner, causal = functools.partial(counting, counts), causal_lm(model)
    modules = (lora, "is_on_gpu"), (matmul, "_has_onednn")
    stand_ins = [(*name, lambda _, truth=name[1] != "_has_onednn": truth) for name in modules]
    stand_ins += [(adapted_linear, "wide_product", wide_mm), (lora, "free_memory", lambda _: sys.maxsize)]
    checks = (packed, "check_trainable"), (masked, "check_supported")  # of layers that are not run
    with ExitStack() as stack:
        for place in [*stand_ins, *((*one, lambda walk, **_: read_head(walk.model)) for one in checks)]:
            stack.enter_context(mock.patch.object(*place))
        kind = CompiledKind(causal.model.layers, functools.partial(compile_fx.compile_fx, inner_compile=inner))
        forward = packed_forward(causal, Rows(prompts, completions), token_budget=1 << 30)
        # The last layer of branches has hooks and runs as it is: those of two completions will do.
        few = packed_forward(causal, Rows(prompts[:2], completions[:2]), keep_states=True)
        batch = Batch(few.rows, units=[spans] * 2, answers=[Span(COMPLETION - 3, COMPLETION)] * 2)
        for name, merges in ((PASSES[3], True), (PASSES[2], False)):
            few.score(batch, mask=0, merge_adapters=merges)
            counts[name] = counts.pop(PASSES[2])
            counts[name]["moved"] *= PROBLEMS * GROUP // 2
        torch.cat(forward.logprobs()).sum().backward()
    if kind.obstacle:
        raise RuntimeError(f"the layers of {MODEL} do not compile: {kind.obstacle}")
    return counts


class Operators(TorchDispatchMode):
    """Give zeros for products, and 30 for token 0, and for attention; count operators and bytes in `counts`."""

    counts: Counter[str] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.split("::")[1], kwargs or {}
        kind = "attention" if "attention" in name else "products" if name in ("mm", "addmm", "bmm") else "others"
        if kind == "others":
            out = func(*args, **kwargs)
        else:
            args, kwargs = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, (args, kwargs))
            out = tree_map(lambda x: torch.zeros_like(x, device="cpu"), func(*args, **kwargs))
            if kind == "products":
                out[..., 0] = 30
        if self.counts is not None and not func.is_view and not name.startswith(("empty", "new_empty", "_unsafe_view")):
            moved = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
            if name in ("embedding", "gather", "index_select", "index", "index_copy_"):  # few rows of the first one
                moved[0] = moved[-1] = moved[-2] if name == "index_copy_" else moved[-1]
            sizes = [min(x.nbytes, x.untyped_storage().nbytes()) for x in moved]  # those of expanded ones are small
            self.counts.update({kind: 1, f"bytes of {kind}": sum(sizes)})
        return out


def count_token(prompt: int, layers: int) -> Counter[str]:
    """Count a token of DECODED * GROUP rows behind prompts of so many tokens, layers not compiled."""
    operators, counts = Operators(), list[Counter[str]]()

    def replay(step: Callable[[], None]) -> None:
        operators.counts = Counter()
        step()
        counts.append(operators.counts)
        operators.counts = None

    with operators:
        decode(model_of(layers, MODELS[MODEL].vocab_size), prompt, replay)
    return counts[0]


def count_compiled(prompt: int) -> Counter[str]:
    """Count a layer of such a token in its graph; `RuntimeError` where it does not compile."""
    model, counts = model_of(2, 256), dict[str, Counter[str]]()
    inner = functools.partial(counting, counts)
    kind = CompiledKind(model.model.layers, functools.partial(compile_fx.compile_fx, inner_compile=inner))
    torch._foreach_zero_([*model.parameters(), *model.buffers()])
    decode(model, prompt, lambda step: step())
    if not kind.decodes:
        raise RuntimeError(f"the layers of {MODEL} do not decode compiled")
    return counts[PASSES[2]]


def model_of(layers: int, vocabulary: int) -> Any:
    """Make a model of so many layers, whose numbers may be any."""
    config = copy.deepcopy(MODELS[MODEL])
    config.num_hidden_layers, config.vocab_size, config.layer_types = layers, vocabulary, config.layer_types[:layers]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    return model.to_empty(device="cpu").requires_grad_(False)


def decode(model: Any, prompt: int, replay: Callable[[Callable[[], None]], None]) -> None:
    """Decode two tokens of DECODED * GROUP rows; the second is a step that is given to `replay`."""
    ids = torch.arange(DECODED).repeat_interleave(GROUP)[:, None].expand(-1, prompt)
    uniforms, sampling = torch.full((len(ids), 2), 0.5).double(), decoding.Sampling(False, 1.0, 0.95, (1,), 0)
    with torch.no_grad(), mock.patch.object(decoding, "capture") as capture:
        capture.side_effect = lambda step, pool: (functools.partial(replay, step), pool)
        decoding.Decoder(model, captured=True)(ids, torch.ones_like(ids), uniforms, sampling)


def page(counts: dict[str, Counter[str]]) -> str:
    """The table of docs/benchmarks.md; gigabytes are those of all layers."""
    rows, kinds = list[list[str]](), ("products", "attention", "fused")
    for name in PASSES:
        numbers, moved = [counts[name][kind] for kind in kinds], counts[name]["moved"] * MODELS[MODEL].num_hidden_layers
        rows.append([name, *map(str, [sum(numbers), *numbers]), f"{moved / 1e9:.0f}"])
    return table(["pass", "launches a layer", *kinds, "GB beside products"], rows)


def main(argv: list[str]) -> int:
    """Print the table; returns the exit status."""
    ArgumentParser(prog="python -m benchmarks launches", description=__doc__).parse_args(argv)
    print(page(count_layer()))
    kinds, rows, layers = ("products", "attention", "others"), list[list[str]](), MODELS[MODEL].num_hidden_layers
    for prompt in PROMPTS:
        one, two, compiled = count_token(prompt, 1), count_token(prompt, 2), count_compiled(prompt)
        layer = {name: two[name] - one[name] for name in one} | {kind: compiled[kind] for kind in kinds[:2]}
        layer |= {"others": compiled["fused"], "bytes of others": compiled["moved"]}
        number = {name: 2 * n - two[name] + layers * layer[name] for name, n in one.items()}
        launches = [number[kind] for kind in kinds]
        moved = [f"{number[f'bytes of {kind}'] / 1e6:.0f}" for kind in kinds]
        rows.append([f"decode, prompts of {prompt}", *map(str, [sum(launches), *launches]), *moved])
    print(table(["pass", "launches a token", *kinds, *(f"MB of {kind}" for kind in kinds)], rows))
    return 0
