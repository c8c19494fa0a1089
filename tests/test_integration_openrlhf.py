"""OpenRLHF's own experience maker and actor with counterfactual credit; libraries that need a GPU are replaced."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, distribution
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from tiny import PHRASES, tiny_model, tiny_tokenizer
from torch import Tensor

from cfa_kernels import CounterfactualConfig, counterfactual_weights
from cfa_kernels.integrations.openrlhf import CounterfactualMixin, CounterfactualPolicyLoss

GPU_LIBRARIES = ("deepspeed", "flash_attn", "vllm", "bitsandbytes", "optree", "pynvml", "torchmetrics")


class Replacements(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports any module of the named packages as one where every name is a mock."""

    def __init__(self, packages: set[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name.startswith("flash_attn.ops"):  # without its kernels OpenRLHF computes log-probs in PyTorch
            return None
        if name.partition(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return MagicMock(__path__=[], __name__=spec.name, __version__="0.99")

    def exec_module(self, module: Any) -> None:
        pass


@pytest.fixture(scope="module")
def openrlhf() -> Any:
    """``RemoteExperienceMaker``, ``Experience`` and ``Actor`` from the installed package."""
    try:
        distribution("openrlhf")
    except PackageNotFoundError:
        pytest.skip("OpenRLHF is not installed")
    pytest.importorskip("ray", reason="ray, which OpenRLHF needs, is not installed")
    patch = pytest.MonkeyPatch()
    absent = {name for name in GPU_LIBRARIES if importlib.util.find_spec(name) is None}
    patch.setattr(sys, "meta_path", [*sys.meta_path, Replacements(absent)])
    maker = importlib.import_module("openrlhf.trainer.ppo_utils.experience_maker")
    experience = importlib.import_module("openrlhf.trainer.ppo_utils.experience")
    actor = importlib.import_module("openrlhf.models.actor")
    patch.setattr(maker, "ray", SimpleNamespace(get=lambda references: references))
    yield SimpleNamespace(Maker=maker.RemoteExperienceMaker, Experience=experience.Experience, Actor=actor.Actor)
    patch.undo()
    for name in [name for name in sys.modules if name.partition(".")[0] in absent | {"openrlhf"}]:
        del sys.modules[name]


class Actors:
    """OpenRLHF's actor group: equal numbers of batches for each of ``number`` actors, all with the same model."""

    def __init__(self, actor: Any, number: int) -> None:
        self.actor, self.number, self.calls = actor, number, []

    def async_run_method_batch(self, method_name: str, **lists: list[Tensor]) -> list[list[Tensor]]:
        assert method_name == "forward"
        batches = list(zip(*(lists[name] for name in ("sequences", "action_mask", "attention_mask")), strict=True))
        assert len(batches) % self.number == 0
        self.calls.append(batches)
        with torch.no_grad():
            given = [self.actor(sequences, actions, attention) for sequences, actions, attention in batches]
        share = len(given) // self.number
        return [given[i : i + share] for i in range(0, len(given), share)]


def settings(**changes: Any) -> Any:
    space = SimpleNamespace
    return space(
        actor=space(num_nodes=1, num_gpus_per_node=changes.get("actors", 1)),
        algo=space(
            advantage=space(estimator=changes.get("estimator", "group_norm"), gamma=1.0, lambd=1.0, no_std_norm=False),
            kl=space(init_coef=changes.get("kl", 0.0), use_loss=changes.get("use_loss", False)),
        ),
        ds=space(ring_attn_size=1, tensor_parallel_size=1),
        reward=space(clip_range=None, overlong_buffer_len=None, stop_properly_penalty_coef=None),
        rollout=space(n_samples_per_prompt=3, micro_batch_size=2),
        train=space(colocate_all=False, colocate_actor_ref=False, seed=0),
    )


@pytest.fixture
def build(openrlhf: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = sys.modules[openrlhf.Maker.__module__]
    monkeypatch.setattr(module, "apply_length_penalties", lambda experiences, args: None)

    def make(credit: CounterfactualConfig | None, **changes: Any) -> Any:
        actor = openrlhf.Actor(tiny_model().eval())
        actor.packing_samples, actor.temperature = False, 1.0  # set by it only where it loads the model itself
        group = Actors(actor, changes.get("actors", 1))
        arguments = (group, None, None, None, SimpleNamespace(value=0.0), SimpleNamespace(args=settings(**changes)))
        if credit is None:
            return openrlhf.Maker(*arguments, tiny_tokenizer())
        cls = type("Maker", (CounterfactualMixin, openrlhf.Maker), {})
        return cls(*arguments, tiny_tokenizer(), counterfactual=credit)

    return make


def completions() -> list[list[int]]:
    vocabulary = tiny_tokenizer().get_vocab()
    a, b, c, d, seven, five = (vocabulary[phrase] for phrase in PHRASES)
    return [[a, b, c, seven, 1], [a, c, d, b, five, 1], [b, d], [d, a, five], [a, b, d, seven], [c, a, b, b, seven, 1]]


PROMPTS = [[3, 4, 5]] * 3 + [[9, 5, 10, 7]] * 3


def experiences(openrlhf: Any, rewards: tuple[float, ...] = (1, 0, 0, 0, 1, 1)) -> list[Any]:
    """Six rollouts in two padded batches, as OpenRLHF concatenates them."""
    made = []
    for rows in (range(4), range(4, 6)):
        ids = [torch.tensor(PROMPTS[i] + completions()[i]) for i in rows]
        width = max(map(len, ids))
        sequences, attention, actions = (torch.zeros(len(ids), width, dtype=torch.long) for _ in range(3))
        for k, (i, row) in enumerate(zip(rows, ids, strict=True)):
            sequences[k, : len(row)], attention[k, : len(row)] = row, 1
            actions[k, len(PROMPTS[i]) : len(row)] = 1
        actions = actions[:, 1:]
        made.append(
            openrlhf.Experience(
                sequences=sequences, attention_mask=attention, action_mask=actions, index=list(rows),
                rewards=torch.tensor([float(rewards[i]) for i in rows]), kl=torch.zeros(actions.shape), info={},
            )
        )  # fmt: skip
    return made


@pytest.mark.parametrize("actors", [1, 2, 3])
def test_the_advantages_are_openrlhfs_times_the_weights_of_the_completions(build, openrlhf, actors):
    stock = build(None).compute_advantages_and_returns(experiences(openrlhf))
    maker = build(CounterfactualConfig(), actors=actors)
    mine = maker.compute_advantages_and_returns(experiences(openrlhf))
    prompts = torch.tensor([[0, *row] if len(row) == 3 else row for row in PROMPTS])
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in completions()], batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)).long() for row in completions()], batch_first=True)
    weights = iter(counterfactual_weights(tiny_model(), tiny_tokenizer(), prompts, (prompts != 0).long(), ids, mask))
    seen = 0
    for expected, given in zip(stock, mine, strict=True):
        for actions, before, after in zip(given.action_mask, expected.advantages, given.advantages, strict=True):
            on = actions.bool()
            torch.testing.assert_close(after[on], before[on] * next(weights)[: on.sum()], rtol=1e-4, atol=1e-5)
            seen += int((after[on] != before[on]).sum())
        assert torch.equal(given.returns, expected.returns)
        assert given.info["credit/weight_mean"].shape == (len(given.sequences),)
    assert seen > 5


def test_rows_without_advantage_are_not_asked_for(build, openrlhf):
    maker = build(CounterfactualConfig())
    maker.compute_advantages_and_returns(experiences(openrlhf, (1, 0, 0, 1, 1, 1)))
    (batches,) = maker.actor_model_group.calls
    assert all(row[:3].tolist() == [3, 4, 5] for sequences, _, _ in batches for row in sequences)
    silent = build(CounterfactualConfig())
    silent.compute_advantages_and_returns(experiences(openrlhf, (1,) * 6))
    assert silent.actor_model_group.calls == []


@pytest.mark.parametrize(
    "credit", [CounterfactualConfig(mode="uniform"), CounterfactualConfig(w_min=1.0, w_max=1.0, w_answer=1.0)], ids=str
)
def test_with_weights_of_one_the_advantages_are_openrlhfs_to_the_last_bit(build, openrlhf, credit):
    stock = build(None).compute_advantages_and_returns(experiences(openrlhf))
    mine = build(credit).compute_advantages_and_returns(experiences(openrlhf))
    assert all(torch.equal(a.advantages, b.advantages) for a, b in zip(stock, mine, strict=True))


def test_a_kl_term_in_the_reward_is_refused_and_one_in_the_loss_is_not(build):
    with pytest.raises(NotImplementedError, match=r"KL term in the reward.*--algo\.kl\.use_loss"):
        build(CounterfactualConfig(), kl=0.1)
    build(CounterfactualConfig(), kl=0.1, use_loss=True)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"policy_loss_type": "sapo"}, ValueError, "policy_loss_type must be ppo or gspo, got 'sapo'"),
        ({"dual_clip": 1.1}, ValueError, r"dual_clip must exceed 1 \+ clip_eps_high = 1.2, got 1.1"),
        ({"is_correction_level": "token"}, NotImplementedError, "is_correction_level='token'"),
    ],
)
def test_the_loss_refuses_bad_settings(options, error, message):
    with pytest.raises(error, match=message):
        CounterfactualPolicyLoss(**options)
