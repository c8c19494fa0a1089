"""Packed trees on OpenRLHF's actors: stand-ins of its classes, then its own with DeepSpeed and Ray, where installed."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cfa_kernels.integrations.openrlhf as integration
from cfa_kernels import CounterfactualConfig
from cfa_kernels.integrations.openrlhf import CounterfactualMixin
from cfa_kernels.integrations.workers import Workers
from cfa_kernels.scoring.access import LogprobService
from tests.support import openrlhf_processes, sharded
from tests.support.openrlhf_host import Host, TreeActors, check_credited, experiences, skip_without
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Experience maker with credit in a stand-in of OpenRLHF, which need not be there."""
    monkeypatch.setattr(integration, "require", lambda *args: None)

    def make(group: Any, credit: CounterfactualConfig | None = None, **changes: Any) -> Any:
        return type("Maker", (CounterfactualMixin, Host), {})(group, counterfactual=credit, **changes)

    return make


@pytest.mark.parametrize(
    ("options", "actors", "copies"),
    [
        ({}, 2, 2),
        ({"effect": "total"}, 2, 1),
        ({"outcome": "mean"}, 1, 1),
        ({"mask": "resampled", "samples": 2}, 3, 1),
        ({"estimator": "prefix_gain"}, 1, 2),
    ],
    ids=str,
)
def test_actors_score_trees_as_one_process_does(maker, options, actors, copies):
    group = TreeActors(actors, copies)
    maker = maker(group, CounterfactualConfig(**options), actors=actors, copies=copies)
    made = maker.compute_advantages_and_returns(experiences(SimpleNamespace))
    check_credited(made, Host(None).compute_advantages_and_returns(experiences(SimpleNamespace)), options)
    check_of_the_model, scored = group.sent[0], group.sent[-1]
    assert check_of_the_model == [0] * actors * copies
    expected = [5] if actors * copies == 1 else [2, 3]  # two groups, of which one has a row without an answer
    assert sorted(scored) == [0] * (actors * copies - len(expected)) + expected
    assert all(made[0].info["credit/tokens_fed"] > 0)


def test_where_others_share_the_gpus_the_cache_is_emptied_and_the_mode_is_openrlhfs_also_after_an_error(monkeypatch):
    group = TreeActors(1, colocate_all=True)
    (worker,) = group.workers
    monkeypatch.setattr(integration, "judge_share", lambda model, share: worker.actor.training)
    assert worker.score_trees([None]) is False
    assert (worker.actor.training, group.emptied) == (True, 1)
    monkeypatch.setattr(integration, "judge_share", lambda model, share: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        worker.score_trees([None])
    assert (worker.actor.training, group.emptied) == (True, 2)


class OldActors(TreeActors):
    """Actors of a launcher that knows nothing of trees."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ray_actor_type = SimpleNamespace(__ray_actor_class__=object)


CANNOT = [
    (TreeActors, {"tensor": 2}, "--ds.tensor_parallel_size 2"),
    (TreeActors, {"deepcompile": True}, "--ds.deepcompile"),
    (OldActors, {}, "an actor class without with_tree_scoring"),
]


@pytest.mark.parametrize(("kind", "changes", "reason"), CANNOT)
def test_where_trees_cannot_be_scored_the_log_says_why_and_requests_are_sent(maker, caplog, kind, changes, reason):
    group = kind(1)
    asked = maker(group, **changes)
    assert isinstance(asked.access, LogprobService)
    assert asked.access is asked.access
    (said,) = [record.getMessage() for record in caplog.records if record.name == Workers.__module__]
    assert said == f"credit: scored by log-prob requests, which share no prefixes, because of {reason}"
    message = rf"effect='total': it needs the model.*requested because of {re.escape(reason)}"
    with pytest.raises(NotImplementedError, match=message):
        maker(group, CounterfactualConfig(effect="total"), **changes)
    assert group.sent == []


def test_a_model_that_has_no_tree_gets_requests_or_is_refused_before_the_first_rollout(maker, caplog):
    model = tiny_model().eval()
    model.lm_head.register_forward_hook(lambda module, args, logits: 2 * logits)
    group = TreeActors(1, model=model)
    asked = maker(group)
    assert isinstance(asked.access, LogprobService)
    assert re.search(r"because of model: the logits of Qwen3ForCausalLM are not its head", caplog.messages[-1])
    with pytest.raises(NotImplementedError, match=r"effect='total'.*requested because of model: the logits"):
        _ = maker(group, CounterfactualConfig(effect="total")).access


def test_trees_are_named_in_the_log_and_what_asks_nothing_does_not_touch_the_actors(maker, caplog):
    caplog.set_level(logging.INFO, Workers.__module__)
    group = TreeActors(2)
    assert isinstance(maker(group, actors=2).access, Workers)
    assert re.fullmatch(r"credit: packed trees are scored on 2 workers in torch.float32", caplog.messages[-1])
    silent = TreeActors(2)
    for options in ({"control": "off"}, {"control": "random"}, {"estimator": "prefix_tree"}):
        asked = maker(silent, CounterfactualConfig(**options), actors=2)
        asked.compute_advantages_and_returns(experiences(SimpleNamespace))
    assert silent.sent == []


def test_openrlhfs_own_experience_maker_credits_by_trees(openrlhf, build):
    stock = build(None).compute_advantages_and_returns(experiences(openrlhf.Experience))
    maker = build(CounterfactualConfig(effect="total"), TreeActors(2), actors=2)
    made = maker.compute_advantages_and_returns(experiences(openrlhf.Experience))
    check_credited(made, stock, {"effect": "total"})


@pytest.mark.parametrize(
    ("stage", "dtype", "changes"),
    [
        (2, "fp32", {}),
        (3, "fp32", {}),
        (3, "bf16", {}),
        (3, "fp32", {"lora": 4}),
        (2, "fp32", {"copies": 2}),
    ],
    ids=str,
)
def test_openrlhfs_own_actor_of_two_processes_scores_trees_as_one_process_does(stage, dtype, changes):
    skip_without("deepspeed", "openrlhf", "ray")
    sharded.run(2, openrlhf_processes.on_openrlhfs_actor, stage, dtype, changes)


def test_under_ray_openrlhfs_group_of_two_actors_credits_by_trees_and_names_the_rank_of_an_error():
    skip_without("deepspeed", "openrlhf", "ray")
    code = "from tests.support.openrlhf_processes import under_ray; under_ray(3)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
