"""prime-rl: credit on verifiers' traces, through a pool that scores token ids, is that of the model itself."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cfa_kernels import Batch, BatchKeys, CounterfactualConfig, DeferredCredit, Rows
from cfa_kernels.integrations.prime_rl import CounterfactualMixin
from tests.support.tiny import PHRASES, tiny_model, tiny_tokenizer

traces = pytest.importorskip("verifiers.v1.trace", reason="verifiers is not installed", exc_type=ImportError)

from verifiers.v1.configs.agent import WireAgentConfig  # noqa: E402
from verifiers.v1.episode import Episode  # noqa: E402
from verifiers.v1.graph import MessageNode  # noqa: E402
from verifiers.v1.task import WireTaskData  # noqa: E402
from verifiers.v1.types import AssistantMessage, ToolMessage, UserMessage  # noqa: E402


class GroupMean:
    """As prime-rl's algorithms are: rewards minus the group's mean, one value for all sampled tokens of a trace."""

    action_loss_type = "rl"

    def __init__(self, config: Any, policy_pool: Any) -> None:
        self.policy_pool = policy_pool

    async def setup(self) -> None:
        pass

    async def score_group(self, episodes: list[Any]) -> None:
        found = [trace for episode in episodes for trace in episode.traces]
        mean = sum(trace.reward for trace in found) / len(found)
        for trace in found:
            for node in trace.nodes:
                if any(node.mask):
                    node.advantages = [trace.reward - mean] * sum(node.mask)


try:  # the real one, where it is installed
    from prime_rl.orchestrator.algo.grpo import GRPOAlgorithm
except ImportError:
    GRPOAlgorithm = GroupMean

A, B, C, D, SEVEN, FIVE = (tiny_tokenizer().get_vocab()[phrase] for phrase in PHRASES)
PROMPT = [3, 4, 5]
TURNS = [
    [[A, B, C, SEVEN, 1]], [[A, 1], [C, D, FIVE, 1]], [[B, D, 1]], [[C, 1], [D, 1], [A, B, SEVEN, 1]],
]  # fmt: skip
TOOL = [9, A, SEVEN, 10]  # reads like a solution


def message(ids: list[int], parent: int | None, *, by: str = "policy", scaffold: int = 0) -> MessageNode:
    """A node; of a policy's first `scaffold` tokens the template wrote."""
    texts = {"user": UserMessage(content="u"), "tool": ToolMessage(content="t", tool_call_id="1")}
    mask = [by == "policy" and i >= scaffold for i in range(len(ids))]
    own = texts.get(by, AssistantMessage(content=f"{ids}"))
    return MessageNode(parent=parent, message=own, sampled=by == "policy", token_ids=ids, mask=mask)


def trace(nodes: list[MessageNode], reward: float) -> Any:
    agent = traces.AgentInfo(config=WireAgentConfig())
    made = traces.Trace(task=traces.TraceTask(type="sums", data=WireTaskData(idx=0)), agent=agent, nodes=nodes, ok=True)
    made.rewards["right"] = traces.Reward(score=reward)
    return made


def rollout(turns: list[list[int]]) -> Any:
    nodes = [message(PROMPT, None, by="user")]
    for i, turn in enumerate(turns):
        if i:
            nodes.append(message(TOOL, len(nodes) - 1, by="tool"))
        nodes.append(message([12, *turn], len(nodes) - 1, scaffold=1))
    return trace(nodes, float(SEVEN in turns[-1]))


def forked() -> Any:
    """Two ends of one beginning, as where a history is rewritten."""
    nodes = [message(PROMPT, None, by="user"), message([A, C, 1], 0)]
    nodes += [message([12, B, SEVEN, 1], 1, scaffold=1), message(TOOL, 1, by="tool"), message([D, A, SEVEN, 1], 3)]
    return trace(nodes, 1.0)


def group() -> list[Any]:
    made = [*map(rollout, TURNS), forked()]
    return [Episode(task=one.task, traces=[one], ok=True) for one in made]


class Pool:
    """In place of prime-rl's: a server's `prompt_logprobs` of token ids."""

    def __init__(self) -> None:
        self.model, self.requests = tiny_model().eval(), 0

    async def score(self, token_ids: list[int]) -> list[float]:
        self.requests += 1
        await asyncio.sleep(0)
        ids = torch.tensor(token_ids)
        with torch.no_grad():
            logprobs = self.model(ids[None]).logits[0, :-1].log_softmax(-1)
        return [0.0, *logprobs.gather(1, ids[1:, None])[:, 0].tolist()]


def algorithm(options: dict[str, Any], base: type = GRPOAlgorithm, pool: Any = None) -> Any:
    own = {"counterfactual": CounterfactualConfig.of(options), "dtype": torch.float32, "tokenizer": tiny_tokenizer()}
    made = type("Credited", (CounterfactualMixin, base), own)(SimpleNamespace(length_penalty=None), pool or Pool())
    asyncio.run(made.setup())
    return made


def assigned(episodes: list[Any], made: Any) -> list[list[list[float]]]:
    asyncio.run(made.score_group(episodes))
    return [[node.advantages for node in one.nodes if any(node.mask)] for e in episodes for one in e.traces]


def rows_of_group() -> tuple[Rows, list[torch.Tensor], list[float]]:
    """The rows that the traces stand for, written out: ids from the first token that is trained there, and masks."""
    rows, masks = [], []
    for turns in TURNS:
        ids, mask = [], []
        for i, turn in enumerate(turns):
            ids += [*(TOOL if i else []), 12, *turn]
            mask += [0] * (len(TOOL) * (i > 0) + 1) + [1] * len(turn)
        rows.append(([*PROMPT, 12], ids[1:]))
        masks.append(mask[1:])
    rows.append((PROMPT, [A, C, 1, 12, B, SEVEN, 1]))
    masks.append([1, 1, 1, 0, 1, 1, 1])
    rows.append(([*PROMPT, A, C, 1, *TOOL], [D, A, SEVEN, 1]))
    masks.append([1] * 4)
    tensors = [[torch.tensor(part) for part in row] for row in rows]
    rewards = [float(SEVEN in turns[-1]) for turns in TURNS] + [1.0, 1.0]
    return Rows([p for p, _ in tensors], [c for _, c in tensors]), [torch.tensor(mask) for mask in masks], rewards


@pytest.mark.parametrize(
    "options", [{}, {"estimator": "prefix_gain"}, {"estimator": "prefix_tree"}, {"control": "permuted"}], ids=str
)
def test_advantages_are_those_of_the_model_itself(options):
    episodes, made = group(), algorithm(options)
    result = assigned(episodes, made)
    rows, masks, rewards = rows_of_group()
    mean = sum(rewards[:-1]) / 5
    batch = Batch(
        rows, advantages=torch.tensor(rewards) - mean, mask=masks, rewards=torch.tensor(rewards),
        groups=torch.tensor([0, 0, 0, 0, 1, 2]),
    )  # fmt: skip
    credit = DeferredCredit(CounterfactualConfig.of(options), tiny_tokenizer(), batch, seed=BatchKeys(0).key(0))
    credit.by_model(tiny_model().eval())
    whole = credit.credited(range(6))
    expected = [values[mask.bool()] for values, mask in zip(whole, masks, strict=True)]
    ours = [torch.tensor([one for node in nodes for one in node]) for nodes in result]
    ours[4:] = ours[4][:6], ours[4][6:]  # the two branches of the last
    for own, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
    assert any(len({*own.tolist()}) > 1 for own in ours)
    assert options.get("estimator") == "prefix_tree" or made.policy_pool.requests > 4
    figures = episodes[0].traces[0].metrics
    assert figures["credit/scored_fraction"] > 0


def test_without_credit_the_advantages_are_the_algorithms():
    made = algorithm({"control": "off"})
    plain = GRPOAlgorithm(SimpleNamespace(length_penalty=None), Pool())
    assert assigned(group(), made) == assigned(group(), plain)
    assert made.policy_pool.requests == 0


def test_what_the_host_cannot_give_is_refused_by_name():
    distilling = type("Distilling", (GroupMean,), {"action_loss_type": "ref_kl"})
    with pytest.raises(NotImplementedError, match="Credited: its tokens feed the 'ref_kl' loss"):
        algorithm({}, distilling)
    with pytest.raises(NotImplementedError, match=r"SimpleNamespace: it has no score\(token_ids\)"):
        algorithm({}, pool=SimpleNamespace())
    episodes = group()[:1]
    with pytest.raises(NotImplementedError, match=f"trace {episodes[0].traces[0].id}, which is the only one"):
        assigned(episodes, algorithm({"estimator": "prefix_tree"}))
    lazy = type("Lazy", (GroupMean,), {"score_group": lambda self, episodes: asyncio.sleep(0)})
    with pytest.raises(ValueError, match=r"branch 0: the algorithm left sampled message 0 without one advantage per"):
        assigned(group(), algorithm({}, lazy))


def test_traces_that_do_not_train_get_nothing():
    episodes = group()
    episodes[0].traces[0].ok = False
    episodes[1].traces[0].agent.trainable = False
    episodes[2].traces[0].nodes[1].mask = []
    assigned(episodes, algorithm({}))
    assert not any("credit/seconds" in episode.traces[0].metrics for episode in episodes[:3])
    assert all("credit/seconds" in episode.traces[0].metrics for episode in episodes[3:])
