"""OpenRLHF's own experience maker and actor with counterfactual credit; libraries that need a GPU are replaced."""

import importlib
import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import cfa_kernels.integrations.openrlhf as integration
from cfa_kernels import CounterfactualConfig, counterfactual_credit, integrations
from cfa_kernels.estimators.base import Importances
from cfa_kernels.integrations.openrlhf import CounterfactualMixin
from tests.support.log_prob_hosts import CREDIT, IMPOSSIBLE, REWARDS, batch_mask, batch_rows
from tests.support.openrlhf_host import Host, check_credited, experiences, settings
from tests.support.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow

UNIFORM = CounterfactualConfig(control="off")


@pytest.mark.parametrize(
    ("options", "actors", "copies"),
    [({}, 1, 1), ({}, 3, 1), ({}, 2, 2), *((options, 1, 1) for options in CREDIT)],
    ids=str,
)
def test_every_estimator_by_name_does_in_openrlhf_what_it_does_with_the_model_at_hand(
    build, openrlhf, options, actors, copies
):
    stock = build(None).compute_advantages_and_returns(experiences(openrlhf.Experience))
    maker = build(CounterfactualConfig(**options), actors=actors, copies=copies)
    mine = maker.compute_advantages_and_returns(experiences(openrlhf.Experience))
    check_credited(mine, stock, options)
    for expected, given in zip(stock, mine, strict=True):
        assert torch.equal(given.returns, expected.returns)
        assert given.info["credit/scored_fraction"][0] > 0
    if options.get("estimator") in ("prefix_tree", "sibling_edits"):
        assert maker.actor_model_group.calls == []


def test_an_estimator_of_the_callers_sees_openrlhfs_groups_and_rewards_and_asks_its_actors(build, openrlhf):
    seen = []

    def estimate(model: Any, batch: Any) -> Importances:
        scores = model.score(batch, mask=0)
        seen.append((batch.groups.tolist(), batch.rewards.tolist(), batch.advantages.shape, scores.base.isfinite()))
        return Importances([torch.ones(len(units)) for units in batch.units], signed=True)

    made = experiences(openrlhf.Experience)
    made[0].index, made[1].index = [5, 3, 0, 4], [2, 1]
    maker = build(CounterfactualConfig(estimator=estimate))
    maker.compute_advantages_and_returns(made)
    ((groups, rewards, shape, answered),) = seen
    assert groups == [1, 1, 0, 1, 0, 0]
    assert rewards == REWARDS
    assert shape == (6,)
    assert answered.tolist() == [True, True, False, True, True, True]
    assert len(maker.actor_model_group.calls) == 1


NO_TREES = ({"estimator": "gradient"}, {"preselect": 0.5, "preselect_by": "gradient"}, {"estimator": "external"})
NO_ENTROPIES = [
    ({"estimator": "entropy"}, "estimator='entropy': it needs the entropy of each"),
    ({"preselect": 0.5, "preselect_by": "entropy"}, "preselect_by='entropy': it needs the entropy of each"),
]


@pytest.mark.parametrize(("options", "message"), [*IMPOSSIBLE, *NO_ENTROPIES], ids=str)
def test_an_estimator_that_needs_the_model_at_hand_is_refused_where_log_probs_are_requested(build, options, message):
    if message is None:
        build(CounterfactualConfig(**options))
        return
    said = rf"cannot be combined with {re.escape(message)}.*\(log-probs are requested because of an actor class"
    with pytest.raises(NotImplementedError, match=said):
        build(CounterfactualConfig(**options))


@pytest.mark.parametrize(
    ("options", "argument", "message"),
    [
        *((*case[:1], "--actor", case[1]) for case in IMPOSSIBLE if case[0] in NO_TREES),
        *((*case[:1], "--actor", case[1]) for case in NO_ENTROPIES),
        ({}, "--train.async_enable", "--train.async_enable"),
        ({}, "--train.async", "--train.async_enable"),
    ],
)
def test_the_launcher_refuses_what_trees_cannot_serve_and_asynchronous_training(
    monkeypatch, options, argument, message
):
    monkeypatch.setattr(sys, "argv", ["train", argument, "--counterfactual", json.dumps(options)])
    with pytest.raises(NotImplementedError, match=f"cannot be combined with {re.escape(message)}"):
        integration.main()


def test_an_estimator_that_compares_completions_is_refused_where_a_prompt_has_one(build):
    with pytest.raises(NotImplementedError, match="estimator='sibling_edits': it needs several completions"):
        build(CounterfactualConfig(estimator="sibling_edits"), samples=1)
    build(CounterfactualConfig(), samples=1)


def test_what_credit_did_is_logged_for_each_sample_and_leaves_a_tools_tokens_out(build, openrlhf):
    made = build(CounterfactualConfig()).compute_advantages_and_returns(experiences(openrlhf.Experience))
    weights = counterfactual_credit(tiny_model(), tiny_tokenizer(), batch_rows(), mask=batch_mask()).weights
    weights[1][1] = float("nan")
    for experience in made:
        for name in ("weight_std", "spans_mean", "drop_mean", "drop_max", "tokens_fed", "seconds"):
            assert experience.info[f"credit/{name}"].shape == (len(experience.sequences),)
        assert experience.info["credit/scored_fraction"][0] == pytest.approx(5 / 6)  # one has no answer
        mean = torch.cat(weights).nanmean()
        torch.testing.assert_close(experience.info["credit/weight_mean"][0], mean, rtol=1e-4, atol=1e-5)


def test_a_sample_that_acted_nowhere_is_left_alone(build, openrlhf):
    made = experiences(openrlhf.Experience)
    made[0].action_mask[0] = 0
    (first, _) = build(CounterfactualConfig()).compute_advantages_and_returns(made)
    assert first.advantages.ne(0).any(1).tolist() == [False, True, True, True]


@pytest.mark.parametrize(("actors", "tokens"), [(1, None), (3, None), (1, 16), (2, 16)])
def test_actors_get_as_many_batches_each_within_the_hosts_limits(build, openrlhf, actors, tokens):
    maker = build(CounterfactualConfig(), actors=actors, **({"tokens": tokens} if tokens else {}))
    maker.compute_advantages_and_returns(experiences(openrlhf.Experience))
    (batches,) = maker.actor_model_group.calls
    assert len({tuple(row.tolist()) for sequences, _, _ in batches for row in sequences}) > 10
    assert all(sequences.numel() <= tokens if tokens else len(sequences) <= 2 for sequences, _, _ in batches)
    assert max(len(sequences) for sequences, _, _ in batches) == 2
    share = len(batches) // actors
    work = [sum(s.numel() for s, _, _ in batches[i : i + share]) for i in range(0, len(batches), share)]
    assert max(work) < 1.5 * min(work)


def test_rows_without_advantage_are_not_asked_for(build, openrlhf):
    maker = build(CounterfactualConfig())
    maker.compute_advantages_and_returns(experiences(openrlhf.Experience, (1, 0, 0, 1, 1, 1)))
    (batches,) = maker.actor_model_group.calls
    assert all(row[:3].tolist() == [3, 4, 5] for sequences, _, _ in batches for row in sequences)
    silent = build(CounterfactualConfig())
    silent.compute_advantages_and_returns(experiences(openrlhf.Experience, (1,) * 6))
    assert silent.actor_model_group.calls == []


@pytest.mark.parametrize("credit", [UNIFORM, CounterfactualConfig(w_min=1.0, w_max=1.0, w_answer=1.0)], ids=str)
def test_with_weights_of_one_the_advantages_are_openrlhfs_to_the_last_bit(build, openrlhf, credit):
    stock = build(None).compute_advantages_and_returns(experiences(openrlhf.Experience))
    mine = build(credit).compute_advantages_and_returns(experiences(openrlhf.Experience))
    assert all(torch.equal(a.advantages, b.advantages) for a, b in zip(stock, mine, strict=True))


def test_a_resumed_step_draws_what_it_would_have_drawn_without_the_break(monkeypatch):
    """OpenRLHF need not be there: what is drawn follows from its seed and step only."""
    monkeypatch.setattr(integration, "require", lambda *args: None)

    def drawn(*steps: int) -> list[Tensor]:
        credit = CounterfactualConfig(control="random")
        maker = type("Maker", (CounterfactualMixin, Host), {})(None, counterfactual=credit)
        found = []
        for step in steps:
            maker.global_step = step
            made = maker.compute_advantages_and_returns(experiences(SimpleNamespace))
            found.append(torch.cat([one.advantages.flatten() for one in made]))
        return found

    first, second, third = drawn(0, 0, 1)
    assert torch.equal(drawn(1)[0], third)
    assert not torch.equal(first, second)
    assert not torch.equal(first, third)


def test_images_of_rollouts_are_refused_where_there_is_credit(build, openrlhf):
    for credit, refused in ((CounterfactualConfig(), True), (UNIFORM, False)):
        made = experiences(openrlhf.Experience)
        made[1].mm_train_inputs = [None, {"pixel_values": torch.zeros(1)}]
        message = r"cannot be combined with images \(mm_train_inputs\)"
        with pytest.raises(NotImplementedError, match=message) if refused else nullcontext():
            build(credit).compute_advantages_and_returns(made)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "gspo"}, "--actor.policy_loss_type gspo: a completion has one ratio there"),
        ({"kl": 0.1}, r"a KL term in the reward; use --algo\.kl\.use_loss"),
        ({"images": 2}, r"images \(--data.max_images_per_prompt 2\)"),
    ],
    ids=str,
)
def test_what_credit_cannot_be_combined_with_is_refused_by_name_unless_it_is_off(build, changes, message):
    with pytest.raises(NotImplementedError, match=f"credit cannot be combined with {message}"):
        build(CounterfactualConfig(), **changes)
    build(UNIFORM, **changes)
    if "kl" in changes:
        build(CounterfactualConfig(), **changes, use_loss=True)


def test_the_example_of_the_documentation_runs(openrlhf):
    page = Path(__file__).resolve().parents[2] / "docs" / "openrlhf.md"
    (code,) = re.findall(r"^```python requires=\S+\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, str(page), "exec"), namespace)
    assert issubclass(namespace["ExperienceMaker"], openrlhf.Maker)
    assert issubclass(namespace["ExperienceMaker"], CounterfactualMixin)


def test_an_absent_or_old_openrlhf_is_an_error_naming_the_version_needed(monkeypatch):
    monkeypatch.setattr(integrations, "version", lambda name: "0.11.1")
    needed = r"cfa_kernels.integrations.openrlhf needs openrlhf>=0.11.2, found 0.11.1"
    with pytest.raises(ImportError, match=needed):
        CounterfactualMixin()
    monkeypatch.setattr(sys, "argv", ["train"])
    with pytest.raises(ImportError, match=needed):
        integration.main()


@pytest.mark.parametrize("option", ["--train.async_enable", "--actor.num_nodes=1"])
def test_with_credit_switched_off_the_launcher_starts_openrlhfs_as_it_is(openrlhf, monkeypatch, option):
    started: list[Any] = []
    monkeypatch.setattr(sys, "argv", ["train", option, "--counterfactual", '{"control": "off"}'])
    monkeypatch.setattr(integration.runpy, "run_module", lambda name, run_name: started.append((name, *sys.argv[1:])))
    stock = openrlhf.trainer.PPOTrainer
    integration.main()
    assert started == [("openrlhf.cli.train_ppo_ray", option)]
    assert openrlhf.trainer.PPOTrainer is stock


def test_the_launcher_starts_openrlhfs_with_credit_in_its_experience_maker(openrlhf, monkeypatch):
    started: list[Any] = []
    monkeypatch.setattr(sys, "argv", ["train", "--counterfactual", '{"w_max": 3.0}', "--actor.num_nodes", "1"])
    monkeypatch.setattr(
        integration.runpy, "run_module", lambda name, run_name: started.append((name, run_name, *sys.argv[1:]))
    )
    actors = importlib.import_module("openrlhf.trainer.ray.ppo_actor")
    plain = actors.PolicyModelActor.__ray_actor_class__
    for module, name in ((openrlhf.trainer, "PPOTrainer"), (actors, "PolicyModelActor")):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back afterwards
    stock = openrlhf.trainer.PPOTrainer.__ray_actor_class__
    integration.main()
    assert started == [("openrlhf.cli.train_ppo_ray", "__main__", "--actor.num_nodes", "1")]
    trainer, actor = (kind.__ray_actor_class__ for kind in (openrlhf.trainer.PPOTrainer, actors.PolicyModelActor))
    assert issubclass(trainer, stock)
    assert issubclass(actor, plain)
    assert actor.score_trees is integration.TreeScoring.score_trees

    def base(self: Any, *args: Any) -> None:
        self.strategy, self.tokenizer, self.kl_ctl = SimpleNamespace(args=settings()), tiny_tokenizer(), None
        self.actor_model_group = self.critic_model_group = self.reward_model_group = self.reference_model_group = None

    monkeypatch.setattr(stock, "__init__", base)
    monkeypatch.setattr(stock, "fit", lambda self, step: started.append("access" in vars(self.experience_maker)))
    trainer().fit()
    assert started[1:] == [True]
    maker = trainer().experience_maker
    assert isinstance(maker, CounterfactualMixin)
    assert isinstance(maker, sys.modules["openrlhf.trainer.ppo_utils.experience_maker"].RemoteExperienceMaker)
    assert maker.counterfactual == CounterfactualConfig(w_max=3.0)
