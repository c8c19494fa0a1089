"""Predictions: operations and packs are the library's, times add up by hand, the page is what the command prints."""

import re

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import scale
from benchmarks.harness.workloads import Job, JobRollouts, random_model, shaped_job
from benchmarks.scale import (
    ACROSS,
    DEALS,
    INSIDE,
    GroupRows,
    ShardedRanks,
    groups_of,
    in_step,
    packs,
    shares,
    traffic,
    weights_of,
)
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


def test_operations_of_a_row_are_those_of_the_models_linear_layers():
    model, counted = random_model("qwen3-tiny", device=CPU, dtype=torch.float32), [0, 0]

    def count(module, args, output):
        counted[module is model.lm_head] += 2 * module.in_features * output.numel()

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(count)
    model(torch.ones(1, 7, dtype=torch.long))
    assert counted[0] == 2 * 7 * weights_of("qwen3-tiny")[0]
    assert weights_of("qwen3-tiny")[1] == model.num_parameters()


def test_completions_fill_packs_as_the_library_cuts_them():
    job = shaped_job(group=6, prompt=20, completion=60, spans=3)
    group = GroupRows(20, (59 + 59 + 41 + 22,) * 6, 0, live=True)  # up to the answer, and from each span on
    work = scored(job, token_budget=500)
    cut = packs([group], 500)
    together = 12 * (6 - len(cut))  # placeholders behind the prompt, which siblings in a pack share
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
    ((name, arguments, printed),) = TABLES
    assert name == "scale"
    assert scale.page(scale.parser().parse_args(arguments.split())) == printed
