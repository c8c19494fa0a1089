"""The time of a step, explained: counts agree with what runs on a CPU, rows with the planner's, times with rates."""

import copy
import dataclasses
import json
import re
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3MoeConfig

from benchmarks.explain import command, measured, table
from benchmarks.explain.batch import described
from benchmarks.explain.rates import GPUS
from benchmarks.explain.rates import measured as with_measured
from benchmarks.explain.step import (
    BACKWARD,
    CREDIT,
    DECODE,
    FORWARD,
    LOSS,
    Training,
    configuration,
    count_decoding,
    count_update,
    policy_on_meta,
)
from benchmarks.explain.tally import ADAPTERS, ATTENTION, GEMM, HEAD, HEADS, SAMPLER, Counts, Operator, Tally
from benchmarks.harness import workloads
from benchmarks.harness.workloads import MODELS, policy
from cfa_kernels import linear_logprob, linear_policy_loss, packed_policy_loss, score_counterfactuals
from cfa_kernels.hf.model import causal_lm

policy_losses, logprob_module = (
    import_module("cfa_kernels.losses.policy"),
    import_module("cfa_kernels.ops.linear_logprob"),
)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
TEXT = PAGE.read_text("utf-8")
TABLES = re.findall(r"<!-- python -m benchmarks step (.*?) -->\n(.*?)<!-- end -->", TEXT, re.DOTALL)
MEMORY = 1e12
SHAPE = {"prompt": 20, "completion": 40, "spans": 2, "mixed": 1.0, "longest": 40, "vocabulary": 1000}
ROWS = 2 * 20 + 4 * 39  # prompts once, completions but for their last tokens


def tiny(**changes):
    config = copy.deepcopy(MODELS["qwen3-tiny"])
    for name, value in changes.items():
        setattr(config, name, value)
    return config


@pytest.fixture(scope="module")
def counted():
    """A tiny model with adapters as PEFT runs them and fused: what a step of 2 x 2 completions asks for."""
    batch = described(2, 2, **SHAPE)
    model = policy_on_meta(tiny(), Training(4))
    return {fused: count_update(model, batch, MEMORY, fused=fused) for fused in (False, True)}


def by_hooks(model: nn.Module, run) -> dict[str, float]:
    """Multiply-adds, twice, of the linear layers that `run` calls, of adapters and of all others."""
    found = {ADAPTERS: 0.0, GEMM: 0.0}

    def count(name):
        def hook(module, args, output):
            flops = 2.0 * module.in_features * output.numel()
            found[ADAPTERS if "lora_" in name else GEMM] += flops

        return hook

    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            module.register_forward_hook(count(name))
    run()  # shows once that the model can be run this way
    found |= dict.fromkeys(found, 0.0)
    run()
    return found


def test_products_are_those_of_the_same_step_on_a_cpu(counted):
    """Forward and credit, in halves, where a CPU runs PEFT's own layers."""
    batch = described(2, 2, **SHAPE)
    model = policy("qwen3-tiny", lora=True, device=torch.device("cpu"), dtype=torch.bfloat16)
    advantages = torch.ones(4)

    def forward():
        packed_policy_loss(model, batch.prompts, batch.completions, None, advantages)

    counts, _ = counted[False]
    scale = {GEMM: 1, ADAPTERS: 32 / 4}  # that policy's adapters are of rank 32
    for part, flops in by_hooks(model, forward).items():
        assert counts.total("flops", FORWARD, part) * scale[part] == flops


def test_attention_sees_the_pairs_of_the_tree(counted):
    config, (counts, _) = tiny(), counted[False]
    pairs = 2 * 20 * 21 / 2 + 4 * (39 * 20 + 39 * 40 / 2)
    per_pair = 4 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    assert counts.total("flops", FORWARD, ATTENTION) == pairs * per_pair
    assert counts.total("flops", BACKWARD, ATTENTION) == 2.5 * pairs * per_pair


def test_rows_are_what_the_program_says_that_it_fed(counted):
    batch = described(2, 2, **SHAPE)
    _, rows = counted[False]
    assert rows == counted[True][1]
    assert rows["tree"] == ROWS
    assert rows["loss"] == 4 * 40
    model = causal_lm(policy("qwen3-tiny", lora=False, device=torch.device("cpu"), dtype=torch.float32))
    scores = score_counterfactuals(
        model, batch.prompts, batch.completions, batch.spans, batch.answers, placeholder_id=0, token_budget=4096
    )
    assert rows["tree"] + rows["branches"] == scores.work.tokens_fed


def test_groups_without_an_advantage_are_decoded_and_not_trained(counted):
    half = described(2, 2, **(SHAPE | {"mixed": 0.5}))
    counts, rows = count_update(policy_on_meta(tiny(), Training(4)), half, MEMORY, fused=False)
    assert (rows["tree"], rows["loss"]) == (ROWS / 2, 2 * 40)
    assert counts.total("flops", FORWARD, GEMM) == counted[False][0].total("flops", FORWARD, GEMM) / 2


def test_a_backward_counts_to_the_part_whose_forward_it_undoes(counted):
    """Frozen weights: as many products as forward, but none for the first layer's inputs, which need no gradient."""
    config = tiny()
    heads, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    spared = 2.0 * ROWS * config.hidden_size * (heads + 2 * kv)
    for fused in (False, True):
        counts, _ = counted[fused]
        assert counts.total("flops", BACKWARD, GEMM) == counts.total("flops", FORWARD, GEMM) - spared
        assert counts.total("flops", BACKWARD, ADAPTERS) > counts.total("flops", FORWARD, ADAPTERS)


def test_training_all_weights_takes_two_products_back_for_each_forward():
    config = tiny()
    counts, _ = count_update(policy_on_meta(config, Training(0)), described(2, 2, **SHAPE), MEMORY, fused=False)
    forward = counts.total("flops", FORWARD, GEMM)
    # The embedding trains, so the first layer's inputs need a gradient too.
    assert counts.total("flops", BACKWARD, GEMM) == 2 * forward
    assert not counts.launches(FORWARD, ADAPTERS)
    assert counts.total("flops", LOSS, HEAD) == 3 * 2.0 * 4 * 40 * config.hidden_size * config.vocab_size


@pytest.mark.parametrize("fused", [False, True])
def test_bytes_of_adapters_a_layer_and_row(fused):
    """Qwen3-1.7B: PEFT's own layers pass over float32 copies; as one op they read rows and add to results.

    What a row more takes: an adapter's own weights are read once, and split, however many rows there are.
    """
    config = configuration("Qwen3-1.7B")
    config.num_hidden_layers = 1
    model = policy_on_meta(config, Training())
    (few, some), (many, more) = (count_update(model, described(n, 8, **SHAPE), MEMORY, fused=fused) for n in (4, 8))
    forward, backward = (
        (many.total("moved", section, ADAPTERS) - few.total("moved", section, ADAPTERS)) / (more["tree"] - some["tree"])
        for section in (FORWARD, BACKWARD)
    )
    if fused:
        assert forward < 130e3
        assert backward < 210e3
    else:
        assert forward > 6 * (2 * 18_432 + 4 * 20_480)


def inside(module, name):
    """Run an operator's own code where counters look into it."""
    code = getattr(module, name)._init_fn
    return mock.patch.object(module, name, torch.no_grad()(lambda *args, **kwargs: code(*args, **kwargs)))


@pytest.mark.parametrize("trains", [False, True])
def test_the_losss_products_are_what_it_multiplies_on_a_cpu(trains):
    hidden, head = torch.randn(6, 8, dtype=torch.float64), torch.randn(11, 8, dtype=torch.float64)
    hidden.requires_grad_()
    head.requires_grad_(trains)
    targets, ones = torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.float64)
    with FlopCounterMode(display=False) as counter, inside(policy_losses, "linear_policy_loss_op"):
        linear_policy_loss(hidden.view(2, 3, 8), head, targets, None, ones[:, 0], ones)
    given = {"hidden": hidden, "head": head, "targets": targets, "rows": None, "wanted": [True, trains, False],
             "level": "token", "chunk_size": 4, "fp32_logits": True}  # fmt: skip
    assert sum(flops for _, flops, _ in HEADS["linear_policy_loss"](given)) == counter.get_total_flops()
    with FlopCounterMode(display=False) as counter, inside(logprob_module, "linear_logprob_op"), torch.no_grad():
        linear_logprob(hidden, head, targets.flatten())
    (one,) = HEADS["linear_logprob"]({"hidden": hidden, "lm_head": head})
    assert one[1] == counter.get_total_flops()


def test_a_decoded_token_reads_the_weights_once_and_every_key():
    config = tiny()
    batch = described(2, 2, **SHAPE)
    model = policy_on_meta(config, Training(4))
    apart, merged = (count_decoding(model, batch, merged=merged) for merged in (False, True))
    weights = sum(m.weight.numel() for n, m in model.named_modules() if type(m) is nn.Linear and "lora_" not in n)
    for counts in (apart, merged):
        assert counts.total("flops", DECODE, GEMM) == 2.0 * 4 * weights
        assert counts.total("moved", DECODE, GEMM) > 2 * weights
    assert apart.launches(DECODE, ADAPTERS)
    assert not merged.launches(DECODE, ADAPTERS)
    assert apart.launches(DECODE, SAMPLER) == merged.launches(DECODE, SAMPLER) > 0
    keys = 4 * 2 * config.num_key_value_heads * config.head_dim * 2 * config.num_hidden_layers  # of a token, bytes
    for counts, tokens in ((apart, 20 + 20), (merged, 20 + 40)):
        queries = 2 * 4 * config.num_attention_heads * config.head_dim * 2 * config.num_hidden_layers
        assert counts.total("moved", DECODE, ATTENTION) == tokens * keys + queries


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def of_experts(training, **changes):
    dense, own = tiny().to_dict(), Qwen3MoeConfig().to_dict()
    shape = {
        name: value for name, value in dense.items() if name in own and name not in ("model_type", "architectures")
    }
    return policy_on_meta(Qwen3MoeConfig(**(shape | EXPERTS)), training, **changes)


def products_of_experts(config, rows):
    return 2.0 * rows * 2 * 3 * config.hidden_size * 32 * config.num_hidden_layers


def test_products_of_experts_count_with_the_base_weights():
    """Every row goes through two of eight: two products, of which the first makes gates and ups."""
    batch, attention = described(2, 2, **SHAPE), Training(4, ("q_proj", "v_proj"))
    model, config = of_experts(attention), tiny()
    counts, _ = count_update(model, batch, MEMORY, fused=True)
    heads, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    dense = 2.0 * config.hidden_size * (2 * heads + 2 * kv + 8) * config.num_hidden_layers
    assert counts.total("flops", FORWARD, GEMM) == dense * ROWS + products_of_experts(config, ROWS)
    found = [operator for operator, _ in counts.of(FORWARD, GEMM) if operator.name == "_grouped_mm"]
    every = 8 * config.hidden_size * 32  # numbers of all experts' gates, or ups, or downs
    assert sorted(o.moved for o in found) == sorted(
        2 * (n * every + 2 * ROWS * (config.hidden_size + n * 32)) for n in (1, 2)
    )
    decoded = count_decoding(model, batch, merged=True)
    head = 2.0 * config.hidden_size * config.vocab_size
    assert decoded.total("flops", DECODE, GEMM) == (dense + head) * 4 + products_of_experts(config, 4)
    # Copies of the weights that each row asks for, as `generate` has them, and their products.
    assert decoded.total("moved", DECODE, GEMM) > 3 * 4 * 2 * 3 * config.hidden_size * 32 * 2 * config.num_hidden_layers


def test_experts_in_float32_take_a_product_each_and_in_training_two_more():
    counts, _ = count_update(of_experts(Training(0), float32=True), described(2, 2, **SHAPE), MEMORY, fused=False)
    config = tiny()
    for section, times in ((FORWARD, 1), (BACKWARD, 2)):
        ran = [(o, n) for o, n in counts.of(section, GEMM) if o.name == "_grouped_mm"]
        assert sum(n for _, n in ran) == times * 2 * 8 * config.num_hidden_layers
        assert sum(o.flops * n for o, n in ran) == times * products_of_experts(config, ROWS)
    assert counts.waits[FORWARD] == 2 * config.num_hidden_layers


def test_experts_that_few_rows_choose_from_are_not_all_read():
    tally, weights = Tally(), torch.empty(8, 16, 32, device="meta", dtype=torch.bfloat16)
    rows = torch.empty(3, 16, device="meta", dtype=torch.bfloat16)
    with tally.within(FORWARD), tally:
        nn.functional.grouped_mm(rows, weights, offs=torch.empty(8, device="meta", dtype=torch.int32))
    ((operator, _),) = tally.counts.of(FORWARD)
    assert operator.flops == 2 * 3 * 16 * 32
    assert operator.moved == 2 * (3 * 16 + 3 * 16 * 32 + 3 * 32)


def test_adapters_on_experts_are_refused_with_what_to_do():
    with pytest.raises(NotImplementedError, match=r"adapters on experts' weights .* --targets, such as q_proj"):
        of_experts(Training(4))


def test_walks_over_modules_are_counted_where_they_happen(counted):
    counts, _ = counted[False]
    assert counts.visits[FORWARD] > 0
    assert counts.visits[BACKWARD] == 0
    assert counts.waits[CREDIT] == 1  # scores are looked at once, at the end


def test_an_operator_takes_the_longest_of_its_products_its_bytes_and_a_launch():
    rates = GPUS["H200"]
    assert rates.seconds(rates.halves, 0.0, torch.bfloat16) == 1
    assert rates.seconds(rates.float32, 0.0, torch.float32) == 1
    assert rates.seconds(1.0, 2 * rates.bandwidth, torch.bfloat16) == 2
    assert rates.seconds(1.0, 1.0, torch.bfloat16) == rates.launch
    assert rates.seconds(rates.halves, 0.0, torch.bfloat16, share=0.5) == 2
    ours = with_measured(rates, {"gemm_tflop_per_s": 700.0, "copy_gb_per_s": 4000.0, "gemm": "8192"}, "NVIDIA H200")
    assert (ours.halves, ours.bandwidth) == (700e12, 4e12)
    assert ours.float32 / ours.halves == pytest.approx(rates.float32 / rates.halves)


@pytest.fixture(scope="module")
def explained():
    return table.explain(tiny, Training(4), described(2, 2, **SHAPE), GPUS["H200"])


def test_totals_are_the_sums_of_their_parts(explained):
    for column in range(len(explained.columns)):
        seconds = {row.name: row.seconds[column] for row in explained.rows}
        parts = [row for row in explained.rows if not row.total]
        total = sum(row.seconds[column] for row in parts)
        assert seconds[table.STEP] == pytest.approx(total)
        assert seconds[table.CREDITS] == pytest.approx(sum(s for n, s in seconds.items() if n.startswith("credit: ")))


def test_decoding_in_a_graph_is_the_shortest_step(explained):
    steps = explained.of(table.STEP).seconds
    assert steps[-1] < min(steps[:-1])


def test_a_host_that_runs_ahead_of_the_device_costs_nothing_and_one_that_does_not_is_waited_for():
    slow = dataclasses.replace(GPUS["H200"], launch=1.0)
    counts = Counts()
    one = table._Counted(counts, counts, trained=0)
    for section in table.ORDER:
        counts.operators[Operator(section, GEMM, "mm", 1.0, 1.0, torch.bfloat16)] = 1
    assert sum(table._waits(one, 1, slow).values()) == pytest.approx(0)
    counts.visits[FORWARD] = 100
    waits = table._waits(one, 1, slow)
    assert waits[FORWARD] == pytest.approx(100 * table.HOST.visit)
    assert sum(waits.values()) == pytest.approx(waits[FORWARD])


def test_what_was_measured_stands_beside_and_says_of_which_rows(tmp_path, explained):
    figure = {"group": "step, a", "name": measured.OURS, "update_seconds": 0.25, "credit_seconds": 0.5,
              "rows_with_gradient": 4944, "rows_without_gradient": 9012}  # fmt: skip
    sampled = figure | {"group": "step with sampling, a", "sampling_seconds": 20.0}
    part = {"figures": [figure, sampled], "workloads": {"step, a": {"model": "Qwen3-1.7B", "trains": "LoRA r = 32"}}}
    document = {"schema": 1, "environment": {"device": {"name": "NVIDIA H200"}}, "parts": {"step": part}}
    (tmp_path / "a.json").write_text(json.dumps(document))
    (tmp_path / "evidence.json").write_text("[]")
    found = measured.find(tmp_path, "Qwen3-1.7B", "H200", "LoRA r = 32")
    assert found[table.UPDATE] == "750 (4,944 + 9,012 rows, a)"
    assert found[table.ROLLOUTS] == "20,000 (4,944 + 9,012 rows, a)"
    assert measured.find(tmp_path, "Qwen3-1.7B", "A100", "LoRA r = 32") == {}
    text = table.markdown(explained, found)
    assert "| 750 (4,944 + 9,012 rows, a) |" in text
    assert "| not measured |" in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--model", "no-such-model"], "model must be one of"),
        (["--spans", "40"], "spans=40 of 12 tokens do not fit in 216"),
        (["--mixed", "2"], "mixed must be"),
        (["--longest", "10"], "longest must be at least"),
        (["--schedule", "--mixed", "0.5"], "leave --mixed and --lengths out"),
    ],
)
def test_what_cannot_be_described_is_refused(given, message, capsys):
    with pytest.raises(SystemExit):
        command.main(["--explain", *given])
    assert message in capsys.readouterr().err


def test_a_configuration_file_will_do_for_a_model(tmp_path):
    tiny(intermediate_size=160).save_pretrained(tmp_path)
    assert configuration(str(tmp_path)).intermediate_size == 160
    assert configuration(str(tmp_path / "config.json")).intermediate_size == 160


def test_without_explain_steps_are_measured(monkeypatch):
    from benchmarks.speed import command as speed

    taken = []
    monkeypatch.setattr(speed, "main", lambda argv: taken.append(argv) or 0)
    assert command.main(["--smoke"]) == 0
    assert taken == [["--only", "step", "--smoke"]]


def test_a_table_takes_the_place_of_the_one_by_the_same_command(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a --gpu X -->\nold\n<!-- end -->\nafter <!-- end -->\n")
    command.write(page, "a --gpu X", "new \\1\n")
    assert page.read_text() == "before\n<!-- a --gpu X -->\nnew \\1\n<!-- end -->\nafter <!-- end -->\n"
    with pytest.raises(ValueError, match="has no place for it: <!-- a -->"):
        command.write(page, "a", "new")


@pytest.mark.slow
def test_the_pages_table_of_a_step_is_what_the_command_prints():
    (given, shown), *schedules = TABLES
    assert len(schedules) == 2
    assert command.page(command.parser().parse_args(given.split())) == shown
    share = shown.splitlines()[-1].split(" | ")[-2].replace("%", " %")
    assert f"credit\nis {share} where every group is mixed" in TEXT


@pytest.mark.slow
@pytest.mark.parametrize(("given", "shown"), TABLES[1:], ids=["small", "large"])
def test_the_pages_tables_of_schedules_are_what_the_commands_print(given, shown, gsm8k):
    assert "--schedule" in given
    assert command.page(command.parser().parse_args(given.split())) == shown


def test_schedules_of_generated_lengths_are_not_said_to_be_of_gsm8k(monkeypatch):
    made = dataclasses.replace(workloads.corpus(), is_real=False)
    monkeypatch.setattr(command, "corpus", lambda: made)
    monkeypatch.setattr(command.Parts, "of", lambda *given, **options: None)
    monkeypatch.setattr(command, "markdown_of_schedules", lambda columns: ", ".join(columns))
    said = command.page(command.parser().parse_args(["--explain", "--schedule"]))
    assert "generated ones, padded" in said
    assert "GSM8K" not in said
