"""Predictions: rows, operations and packs are the library's, times add up by hand, the page is what commands print."""

import re

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import explain, scale
from benchmarks.explain import StepShape, configuration, parts, sizes
from benchmarks.harness.workloads import Job, JobRollouts, random_model, shaped_job
from benchmarks.scale import ACROSS, DEALS, INSIDE, GroupRows, ShardedRanks, groups_of, in_step, packs, shares, traffic
from cfa_kernels import Span
from tests.conftest import REPOSITORY
from tests.support.models import score_columns

PAGE = REPOSITORY / "docs" / "planning.md"
TABLES = re.findall(r"<!-- python -m benchmarks (\w+)(.*?) -->\n(.*?)<!-- end -->", PAGE.read_text("utf-8"), re.DOTALL)
CPU = torch.device("cpu")


def scored(job, token_budget=100_000):
    model = random_model("qwen3-tiny", device=CPU, dtype=torch.float32)
    return score_columns(
        model, job.prompts, job.completions, job.spans, job.answers, mask=job.placeholder_id,
        token_budget=token_budget,
    ).work  # fmt: skip


def test_rows_of_a_step_are_what_the_library_feeds():
    batch = StepShape(1, 3, prompt=20, completion=60, longest=60, spans=3, mixed=1)
    job = shaped_job(group=3, prompt=20, completion=60, spans=3)
    assert job.spans[0] == [(start, start + explain.SPAN) for start in batch.starts]
    assert batch.rows + batch.branch_rows == scored(job).tokens_fed


def test_operations_of_a_row_are_those_of_the_models_linear_layers():
    model, counted = random_model("qwen3-tiny", device=CPU, dtype=torch.float32), [0, 0]

    def count(module, args, output):
        counted[module is model.lm_head] += 2 * module.in_features * output.numel()

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(count)
    model(torch.ones(1, 7, dtype=torch.long))
    result = sizes(configuration("qwen3-tiny"))
    assert counted == [2 * 7 * result.products, 2 * 7 * result.hidden * result.vocabulary]
    assert result.weights == model.num_parameters()


def test_adapters_add_parts_and_spare_a_product_of_the_backward():
    model, batch = sizes(configuration("qwen3-tiny")), StepShape(2, 2, 20, 60, 60, 3, mixed=2)
    adapted, full = ({one.name: one for one in parts(model, batch, rank)} for rank in (4, 0))
    merged = "rollouts: adapters merged, weights restored"
    assert adapted.keys() - full.keys() == {
        merged,
        *(f"{name}: adapters" for name in ("forward", "backward", "credit")),
    }
    assert full["backward: base products"].flops == 2 * adapted["backward: base products"].flops
    half = {one.name: one for one in parts(model, StepShape(2, 2, 20, 60, 60, 3, mixed=1), 4)}
    assert half["credit: base products"].flops == adapted["credit: base products"].flops / 2
    assert half["rollouts: prompts, once a group"] == adapted["rollouts: prompts, once a group"]


def test_a_part_takes_the_longest_of_its_products_its_bytes_and_its_launches():
    gpu, part = explain.GPUS["H200"], explain.Part
    assert part("a", gpu.products, 0, "").seconds(gpu) == 1
    assert part("a", gpu.products, 0, "", share=0.5).seconds(gpu) == 2
    assert part("a", 1, 3 * gpu.bandwidth, "", idle=1).seconds(gpu) == 4
    assert part("a", 1, 1, "", launches=5).seconds(gpu) == 5 * explain.LAUNCH


def test_a_pass_takes_as_long_as_its_kernels_or_their_launches():
    gpu, part = explain.GPUS["H100"], explain.Part
    every = [part("forward: a", gpu.products, 0, ""), part("backward: a", 0, 0, ""), part("rollouts: b", 0, 0, "")]
    waits = {one.name.partition(":")[0]: one.seconds(gpu) for one in explain.launches(every, 28, gpu)}
    assert waits == {name: 28 * seconds for name, seconds in explain.HOST.items()} | {"forward": 0}


def test_completions_fill_packs_as_the_library_cuts_them():
    job = shaped_job(group=6, prompt=20, completion=60, spans=3)
    group = GroupRows(20, (59 + 59 + 41 + 22,) * 6, 0, live=True)  # up to the answer, and from each span on
    work = scored(job, token_budget=500)
    cut = packs([group], 500)
    together = explain.SPAN * (6 - len(cut))  # placeholders behind the prompt, which siblings in a pack share
    assert (len(cut), sum(cut) - together) == (work.forwards, work.tokens_fed)


def test_a_forward_takes_as_long_as_on_the_rank_with_the_most_rows_in_it():
    both = in_step([[100, 50], [80], []], float)
    assert (both.forwards, both.idle) == (2, pytest.approx(1 - 230 / 3 / 150))
    assert str(both) == "48.9% (2)"
    assert in_step([[70]], float).idle == in_step([[], []], float).idle == 0


def test_a_forward_takes_its_products_or_its_gathering_whichever_is_longer():
    node, many = (ShardedRanks(count, 10, 20, 1e6) for count in (8, 64))
    assert ShardedRanks(1, 10, 20, 1e6).moving(1e9) == 0
    assert node.moving(1e9) == pytest.approx(7 / 8 * 1e9 / INSIDE)
    assert many.moving(1e9) == pytest.approx(63 / 64 * 1e9 / ACROSS)
    assert many.forward(0) == many.moving(40)
    assert many.update(0) == pytest.approx(many.moving(2 * 40 + 20 * 4))
    assert many.update(1e9) == pytest.approx(3 * many.forward(1e9)) == pytest.approx(3 * 2 * 10 * 1e9 / 1e6)


@pytest.mark.parametrize("live", [False, True])
def test_every_way_of_dealing_gives_each_sampled_group_to_one_rank(live):
    drawn = np.random.default_rng(1).gamma(3.7, 450, 653).astype(int) + 10
    groups = [GroupRows(0, (rows,), rows, i % 2 == 0) for i, rows in enumerate(drawn.tolist())]
    dealt = dict(shares(groups, 64, 16, live=live))
    assert dealt.keys() == DEALS.keys()
    everything = [sorted(group.rows for share in ranks for group in share) for ranks in dealt.values()]
    assert everything[0] == everything[1] == everything[2]
    assert (len(everything[0]) < 64 * 16) == live
    idle = {name: in_step([packs(share, 65_536) for share in ranks], float).idle for name, ranks in dealt.items()}
    assert idle["by rows"] < 0.05 < 0.15 < idle["as sampled"]


def test_groups_and_bytes_of_rollouts_follow_from_their_lengths():
    prompts = [torch.arange(4)] * 2 + [torch.arange(6)] * 2
    job = Job("made", "made here", prompts, [torch.arange(10)] * 4, [[Span(1, 3), Span(3, 5)]] * 4, [Span(8, 10)] * 4,
              0, None)  # fmt: skip
    rollouts = JobRollouts(job, 2, torch.tensor([1.0, 0, 1, 1]), torch.tensor([1.0, -1, 0, 0]))
    branches = 9 + (9 - 1) + (9 - 3)
    assert groups_of(rollouts) == [GroupRows(4, (branches,) * 2, 24, True), GroupRows(6, (branches,) * 2, 26, False)]
    p, t, k = 5, 10, 2  # means
    requests, answers, tree, weights = traffic(rollouts).values()
    assert answers == (k + 1) * (p + t) * 4
    assert requests == (k + 1) * (3 * p + 5 * t) * 8 + answers
    assert tree == (p / 2 + t + 2 * (k + 1)) * 8 + (k + 1) * 4
    assert weights == 4 * t


@pytest.mark.slow
def test_the_pages_tables_are_what_the_commands_print(gsm8k):
    assert [name for name, _, _ in TABLES] == ["explain", "scale"]
    for module, (_, arguments, printed) in zip((explain, scale), TABLES, strict=True):
        assert module.page(module.parser().parse_args(arguments.split())) == printed
