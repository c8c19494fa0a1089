"""Compiled layers compute what the layers compute, to the same bits, by few graphs, whatever the packs."""

import gc
import logging
import weakref
from importlib import import_module
from types import MethodType

import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from cfa_kernels import Rows, Span, packed_forward, packed_policy_loss
from cfa_kernels.model import lora
from cfa_kernels.model.compile_layers import compile_layers
from cfa_kernels.model.limits import kept_per_row
from cfa_kernels.model.parts import causal_lm
from cfa_kernels.model.walk import ModelWalk
from cfa_kernels.ops import adapted_linear, matmul
from cfa_kernels.tree.attention_options import AttentionRule
from cfa_kernels.tree.segment_table import SegmentTable
from tests.support.models import PLACEHOLDER, make_model, score_forward, small_model, tokens
from tests.support.sharded import run, values, wrapped

attention = import_module("cfa_kernels.tree.attention")

pytestmark = [pytest.mark.slow, pytest.mark.traced]
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}


def attend(q, k, v, sinks, handle, segments, contexts, scale, softcap, window, chunk, first):
    table = SegmentTable.of(handle, segments, contexts)
    rule = AttentionRule(scale, window, chunk, softcap, sinks)
    return attention.tree_attention_reference(q, k, v, table, rule, first)


def forward_by_definition(q, *inputs):
    *options, with_lse = inputs
    return attend(q, *options).contiguous(), q.new_zeros(q.shape[:2] if with_lse else (0,))


def backward_by_definition(by_out, q, k, v, sinks, out, lse, *options):
    keys = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(keys.AutogradCPU).remove(keys.ADInplaceOrView)
    included = torch._C._dispatch_tls_local_include_set().add(keys.AutogradCPU)
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        gradients = torch.autograd.grad(attend(*leaves, sinks, *options, 0), leaves, by_out)
    return *(x.contiguous() for x in gradients), q.new_empty(0)


def put_on_a_gpu(monkeypatch):
    """Make attention one operator, which computes its definition, and products torch's."""
    monkeypatch.setitem(attention.tree_attention_op._backend_fns, None, forward_by_definition)
    monkeypatch.setitem(attention.tree_attention_backward_op._backend_fns, None, backward_by_definition)
    monkeypatch.setattr(matmul, "_has_onednn", lambda _: False)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    put_on_a_gpu(monkeypatch)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def policy(name, adapters=None, *, checkpointing=False, **changes):
    model = make_model(name, **SMALL | changes)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if adapters is not None:
        options = {"r": 4, "lora_alpha": 3, "target_modules": "all-linear", "init_lora_weights": False, **adapters}
        model = get_peft_model(model, LoraConfig(**options))
        causal_lm(model).enable_input_require_grads()
    return model.train()


def step(model, lengths, **options):
    """What a step with credit computes of one prompt's completions: log-probs, drops, gradients."""
    prompt, completions = tokens(6)[0], tokens(*lengths, seed=1)
    forward = packed_forward(causal_lm(model), Rows([prompt] * len(lengths), completions), keep_states=True)
    spans, answers = [[Span(1, 3), Span(4, 5)]] * len(lengths), [Span(8, 10)] * len(lengths)
    drops = score_forward(forward, spans, answers, mask=PLACEHOLDER, **options).drop
    logprobs = torch.cat(forward.logprobs())
    leaves = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad((logprobs * logprobs.detach().cos()).sum(), leaves.values())
    return {"logprobs": logprobs.detach(), "drops": torch.cat(drops), **dict(zip(leaves, gradients, strict=True))}


def assert_same(result, expected):
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


BATCHES = (12, 15), (11, 17, 10), (13,)
WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}


def runs_ligers_kernels(model, monkeypatch):
    """Let norms run what Liger would put there; the list grows when they do."""
    ran = []

    def kernel(self, hidden):
        torch._dynamo.graph_break()  # as a launch of Liger's is
        ran.append(self)
        return type(self).forward(self, hidden)

    monkeypatch.setattr(kernel, "__module__", "liger_kernel.transformers.rms_norm", raising=False)
    for layer in causal_lm(model).model.layers:
        layer.input_layernorm.forward = MethodType(kernel, layer.input_layernorm)
    return ran


@pytest.mark.parametrize(
    ("name", "adapters", "changes"),
    [
        ("Qwen3", {}, {"head_dim": 8, "checkpointing": True}),
        ("Gemma3Text", {"target_modules": ["k_proj"], "lora_bias": True}, {"head_dim": 8, **WINDOWS}),
        ("Qwen3Moe", None, {"head_dim": 8}),
    ],
    ids=["checkpointed, one op", "PEFT, windows, Liger", "experts"],
)
def test_compiled_layers_give_the_same_bits_by_few_graphs(name, adapters, changes, monkeypatch, caplog):
    model = policy(name, adapters, **changes)
    with monkeypatch.context() as formula:  # of graphs, which leave an addition to what reads the sum
        for module in (matmul, adapted_linear):
            formula.setattr(module, "is_compiling", lambda: True)
        expected = [step(model, lengths) for lengths in BATCHES]
    merged = [step(model, lengths, merge_adapters=True) for lengths in BATCHES if adapters == {}]
    before, kept, ran = graphs(), kept_per_row(ModelWalk.of(causal_lm(model))), []
    if name == "Gemma3Text":  # a graph runs what its class has, a layer with hooks runs as it is
        ran = runs_ligers_kernels(model, monkeypatch)
    kinds = compile_layers(model, backend="aot_eager")
    is_older = Version(torch.__version__) < Version("2.13") or Version(transformers.__version__) < Version("5.23")
    if name == "Qwen3Moe" and is_older and not kinds:  # before 5.23 no operator on a CPU has experts' gradients
        assert "run as they are, not compiled" in caplog.text
        pytest.skip("this torch or transformers does not compile products of experts")
    assert kept_per_row(ModelWalk.of(causal_lm(model))) < kept
    assert set(kinds) == {type(layer).__name__ for layer in causal_lm(model).model.layers}
    counts = []
    ran.clear()
    for lengths, truth in zip(BATCHES, expected, strict=True):
        assert_same(step(model, lengths), truth)
        counts.append(graphs() - before)
    assert counts[-1] <= 4 * len(kinds)
    assert counts[-1] == counts[0], "later packs need no graph of their own"
    assert not ran
    if name == "Gemma3Text":
        causal_lm(model)(tokens(5)[0][None])
        assert len(ran) == 2
        before, seen = graphs(), []
        with causal_lm(model).model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1)):
            step(model, BATCHES[0])
        assert seen
        assert graphs() - before <= 2
    if adapters != {}:
        return
    counts = []  # weights with their adapters' products merged in have a graph of their own
    for lengths, truth, drops in zip(BATCHES, merged, expected, strict=True):
        torch.testing.assert_close(truth["drops"], drops["drops"], rtol=0, atol=1e-4)
        for merges in (True, False):
            result = step(model, lengths, merge_adapters=merges)["drops"]
            torch.testing.assert_close(result, truth["drops"] if merges else drops["drops"], rtol=0, atol=1e-6)
        counts.append(graphs())
    assert counts[-1] == counts[0], "later packs need no graph of their own"


@pytest.mark.parametrize("first", ["compiled", "checkpointed"])
def test_layers_inside_torchs_checkpoints_run_compiled_whichever_came_first(first):
    model, ran = policy("Qwen3", head_dim=8), []
    layers = model.model.layers
    expected = step(model, BATCHES[0])

    def backend(graph, inputs):
        compiled = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
        return lambda *args: ran.append(1) or compiled(*args)

    if first == "compiled":
        assert compile_layers(model, backend=backend) == ["Qwen3DecoderLayer"]
    for i, layer in enumerate(layers):
        layers[i] = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    if first == "checkpointed":
        assert compile_layers(model, backend=backend) == ["Qwen3DecoderLayer"]
    step(model, BATCHES[0])  # checked as it is now
    ran.clear()
    result = step(model, BATCHES[0])
    assert_same({name.replace("_checkpoint_wrapped_module.", ""): value for name, value in result.items()}, expected)
    assert len(ran) == 3 * len(layers) - 1, "forward, branches but for the last layer's few rows, and forward again"


@pytest.mark.parametrize("free", [0, 1 << 40])
def test_adapters_are_columns_of_copied_weights_where_there_is_memory(free, monkeypatch, caplog):
    monkeypatch.setattr(lora, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(lora, "free_memory", lambda _: free)
    model = policy("Qwen3", {"r": 8}, head_dim=8)
    for parameter in model.parameters():
        parameter.data = parameter.data if parameter.requires_grad else parameter.data.bfloat16()
    own = [step(model, lengths) for lengths in BATCHES]
    assert compile_layers(model, backend="aot_eager")

    def near(results, expected):
        pairs = ((results[name], expected[name]) for name in expected if name != "drops")  # those are differences
        return all((result - value).norm() < 0.1 * value.norm() for result, value in pairs)

    walk, counts = ModelWalk.of(causal_lm(model)), []
    for lengths, expected in zip(BATCHES, own, strict=True):
        assert near(step(model, lengths), expected)
        counts.append(graphs())
    assert counts[-1] == counts[0], "later packs need no graph of their own"
    copies = [group.parts.wide is not None for group in walk.kept["groups"].all]
    assert copies == [free > 0 and group.name != "o_proj" for group in walk.kept["groups"].all]
    assert caplog.text.count("adapters of Qwen3ForCausalLM are multiplied one by one: copies of its w") == (free == 0)
    layer = causal_lm(model).model.layers[0].mlp.gate_proj
    for weight in (layer.lora_B["default"].weight, layer.base_layer.weight):
        with torch.no_grad():
            weight.mul_(2)
        result = step(model, BATCHES[0])
        assert not near(result, own[0])
        walk.kept.pop("groups")
        assert_same(step(model, BATCHES[0]), result)
    assert graphs() == counts[0]


def test_what_does_not_compile_is_named_and_runs_as_it_is(caplog):
    model = policy("Qwen3", {"use_dora": True, "target_modules": ["q_proj"]}, head_dim=8)
    expected = step(model, BATCHES[0])

    def backend(graph, inputs):
        raise ValueError("no kernel for that")

    with caplog.at_level(logging.WARNING):
        assert compile_layers(model, backend=backend) == []
        assert_same(step(model, BATCHES[0]), expected)
    text = "layers of Qwen3DecoderLayer run as they are, not compiled: "
    assert sum(text in record.message for record in caplog.records) == 1


def test_layers_that_compile_to_other_results_run_as_they_are(caplog):
    model = policy("Llama")
    expected = step(model, BATCHES[0])
    layers = causal_lm(model).model.layers.requires_grad_(False)

    def wrong(graph, inputs):
        return lambda *args: [out * 1.001 if torch.is_floating_point(out) else out for out in graph(*args)]

    assert compile_layers(model, backend=wrong) == []
    assert "a small tree's results differ by 0.00" in caplog.text
    layers.requires_grad_(True)
    assert_same(step(model, BATCHES[0]), expected)


def test_what_cannot_be_compiled_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="layers of Qwen3ForCausalLM cannot be compiled: on a CPU"):
        compile_layers(small_model())
    model = policy("Qwen3", {"lora_dropout": 0.1}, head_dim=8)
    with pytest.raises(NotImplementedError, match="lora_dropout"):
        compile_layers(model, backend="aot_eager")


def test_the_layers_of_a_compiled_model_are_freed_with_it():
    model = policy("Qwen3", head_dim=8)
    assert compile_layers(model, backend="aot_eager")
    layer = weakref.ref(causal_lm(model).model.layers[0])
    del model
    torch._dynamo.reset()
    gc.collect()
    assert layer() is None


def sharded_steps(rank: int) -> None:
    """Train compiled layers and layers as they are, both in pieces: equal gradients, and no graphs of later steps."""
    put_on_a_gpu(pytest.MonkeyPatch())
    ran, counts = [], []

    def backend(graph, inputs):
        compiled = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
        return lambda *args: ran.append(rank) or compiled(*args)

    models = [policy("Qwen3", head_dim=8) for _ in range(2)]
    assert compile_layers(models[1], backend=backend) == ["Qwen3DecoderLayer"]
    models[1] = torch.compile(models[1], backend="eager")  # as accelerate does; our body is not traced
    shared = [wrapped(model, "FSDP2") for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in shared]
    with pytest.raises(NotImplementedError, match="in pieces on several processes; call compile_layers before"):
        compile_layers(shared[1], backend=backend)
    for lengths in ([12, 15], [13]), ([11, 17, 10], [14]), ([13], [9, 9, 18]):  # one process feeds more packs
        results, before, ran[:] = [], graphs(), []
        for model, optimizer in zip(shared, optimizers, strict=True):
            optimizer.zero_grad()
            completions = tokens(*lengths[rank], seed=1 + rank)
            rows = Rows(tokens(*range(6, 6 + len(completions))), completions)
            loss = packed_policy_loss(model, rows, advantages=torch.linspace(1, -0.5, len(rows)), token_budget=1)
            loss.loss.backward()
            optimizer.step()
            results.append([*values(model, gradients=True).values()])
        assert len(results[0]) == len([*models[0].parameters()])
        torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-7)
        counts.append(graphs() - before)
        assert len(ran) == SMALL["num_hidden_layers"] * len(completions), "each completion is a pack"
    assert counts[0] <= 4
    assert counts[1:] == [0, 0], "later steps need no graph of their own"


def test_layers_compiled_before_fully_shard_run_compiled_after_it():
    run(2, sharded_steps)
