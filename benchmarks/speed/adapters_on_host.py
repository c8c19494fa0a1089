"""Compare what adapters cost the host: `python -m benchmarks.speed.adapters_on_host [ROUNDS]`.

CPU seconds on one pinned thread, in turns, of the forward, the credit and the backward of 28 layers on a few rows, by
PEFT's own layers and by one op, and the operators that each launches, without those that only make memory. Float64
adapters on float32 rows stand for float32 ones on halves, whose products are slow on a CPU; attention and wide products
are stubs.
"""

import contextlib
import gc
import itertools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.speed.bench_step import one_pinned_thread
from cfa_kernels import Rows, Span
from cfa_kernels.hf import lora, tree_forward
from cfa_kernels.hf.head import read_head
from cfa_kernels.ops import adapted_linear
from cfa_kernels.scoring import training_forward

STAGES = ("forward", "credit", "backward")


def _multiply(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
    if out.dtype == left.dtype:
        return torch.addmm(out, left, right, out=out) if add else torch.mm(left, right, out=out)
    torch.mm(left, right)  # a GPU writes it in the wide dtype
    return out.zero_()


class _Launches(TorchDispatchMode):
    count = 0

    def read(self) -> int:
        return self.count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += not func.is_view and func.overloadpacket.__name__ not in ("empty", "new_empty", "zero_")
        return func(*args, **(kwargs or {}))


def _side(stack: contextlib.ExitStack, name: str) -> None:
    patches = [
        mock.patch.object(tree_forward, "tree_attention", lambda q, *_, **__: q * 1.0),
        mock.patch.object(training_forward, "check_trainable", lambda walk, **_: read_head(walk.model)),
    ]
    if name == "PEFT's layers":
        patches.append(mock.patch.object(lora, "_lora_layers", return_value=[]))
    else:
        patches += [mock.patch.object(lora, check, lambda *_: True) for check in ("is_on_gpu", "_dtypes_fit")]
        patches.append(mock.patch.object(adapted_linear, "multiply", _multiply))
        patches.append(mock.patch.object(adapted_linear, "product", torch.mm))  # as on a GPU
    for patch in patches:
        stack.enter_context(patch)


def main(rounds: int) -> None:
    """Print medians, and operators of one step."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=512, num_hidden_layers=28, head_dim=16, **shape)
    adapters = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(Qwen3ForCausalLM(config), adapters).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.double()
    optimizer, causal = torch.optim.SGD(trained, lr=1e-9), model.get_base_model()
    rows = Rows([torch.arange(1, 9)] * 2, [torch.arange(10, 22), torch.arange(30, 42)])

    def step(read: Callable[[], float]) -> list[float]:
        marks = [read()]
        forward = training_forward.packed_forward(causal, rows, keep_states=True)
        marks.append(read())
        forward.score([[Span(1, 3), Span(4, 6)]] * 2, [Span(10, 12)] * 2, mask=0)
        loss = sum(row.sum() for row in forward.logprobs())
        marks.append(read())
        loss.backward()  # type: ignore[union-attr]
        marks.append(read())
        optimizer.step()
        optimizer.zero_grad()
        return [after - before for before, after in itertools.pairwise(marks)]

    seconds, launches = defaultdict(list), {}
    gc.disable()
    with one_pinned_thread():
        for i in range(rounds + 2):
            for name in ("PEFT's layers", "one op"):
                gc.collect()  # of all of torch's objects, which else falls into some stage
                with contextlib.ExitStack() as stack:
                    _side(stack, name)
                    if i == 1:
                        launches[name] = step(stack.enter_context(_Launches()).read)
                    elif (took := step(time.process_time)) and i:
                        seconds[name].append(took)
    for name, took in seconds.items():
        medians = [statistics.median(column) * 1e3 for column in zip(*took, strict=True)]
        parts = zip(STAGES, medians, launches[name], strict=True)
        print(f"{name}: " + ", ".join(f"{stage} {ms:.1f} ms, {count} operators" for stage, ms, count in parts))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
