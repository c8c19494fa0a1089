"""The ids that a sampler kept (`sampling_mask`): the packed loss is TRL's with log-probs normalised over them.

TRL up to 1.16 records none, so its loss gets log-probs by the definition: a softmax over the kept ids.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import PartialState

from cfa_kernels import CounterfactualConfig, KeptTokens

integration = pytest.importorskip("cfa_kernels.integrations.trl", reason="TRL is not installed", exc_type=ImportError)


from cfa_kernels.integrations.trl_credit import KEPT  # noqa: E402
from cfa_kernels.integrations.vllm_kept import record_kept_ids  # noqa: E402
from tests.support.tiny import tiny_model  # noqa: E402
from tests.support.trl_exact import Exact, assert_equal, batch, both, loss_and_gradients  # noqa: E402
from tests.support.trl_training import LORA, logged, packs, record_generations, rollouts, seven  # noqa: E402

# All is on the host: nothing to tell apart.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.traced, packs]


class Replayed(Exact):
    """TRL's loss whose log-probs and entropies are those of the kept ids."""

    kept: list[KeptTokens]

    def _get_per_token_logps_and_entropies(self, model: Any, ids: Any, mask: Any, count: int, **_: Any) -> Any:
        output = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
        logits = output.logits[:, -count - 1 : -1] / self.temperature
        for row, one in enumerate(self.kept):
            for t in one.counts.nonzero().flatten().tolist():
                own = one.ids[one.offsets[t] : one.offsets[t + 1]]
                others = torch.ones(logits.shape[-1], dtype=torch.bool).index_fill_(0, own, False)
                logits[row, t] = logits[row, t].masked_fill(others, float("-inf"))
        logprobs = logits.log_softmax(-1)
        own = logprobs.gather(-1, ids[:, -count:, None])[..., 0]
        return own, -(logprobs.exp() * logprobs).nan_to_num(nan=0.0).sum(-1), None


def kept_of(inputs: dict[str, Any], vocabulary: int) -> list[KeptTokens]:
    """Some ids around each token's own, for two tokens of three."""
    generator = torch.Generator().manual_seed(4)
    return [
        KeptTokens.of(
            [
                [] if t % 3 == 1 else [*torch.randint(0, vocabulary, (4,), generator=generator).tolist(), int(token)]
                for t, token in enumerate(row)
            ]
        )
        for row in inputs["completion_ids"]
    ]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Any, Any]:
    return both(tmp_path_factory.mktemp("run"), kind=Replayed)


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"loss_type": "grpo", "temperature": 0.7, "_temperature": 0.7},
        {"importance_sampling_level": "sequence", "loss_type": "grpo"}, {"top_entropy_quantile": 0.43},
    ],
    ids=str,
)  # fmt: skip
def test_loss_and_gradients_are_those_of_log_probs_over_the_kept_ids(pair, monkeypatch, changes):
    for trainer in pair:
        for name, value in changes.items():
            monkeypatch.setattr(trainer, name, value, raising=False)
    inputs = batch()
    if "importance_sampling_level" in changes:
        inputs["advantages"] = inputs["advantages"][:, 0].clone()
    whole, _ = loss_and_gradients(pair[1], inputs)
    pair[0].kept = inputs[KEPT] = kept_of(inputs, pair[0].model.config.vocab_size)
    assert abs(loss_and_gradients(pair[1], inputs)[0] - whole) > 1e-4
    assert_equal(pair, inputs)


def test_a_sampler_of_the_same_policy_has_ratio_1_over_what_it_kept(pair, monkeypatch):
    (theirs, ours), inputs = pair, batch()
    monkeypatch.setattr(ours, "use_vllm", True)
    monkeypatch.setattr(ours, "_corrects", True)
    ours._metrics["train"].clear()
    del inputs["old_per_token_logps"]
    theirs.kept = kept = kept_of(inputs, theirs.model.config.vocab_size)
    ids, mask = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], 1) for x in ("ids", "mask"))
    with torch.no_grad():
        inputs["sampling_per_token_logps"] = theirs._get_per_token_logps_and_entropies(theirs.model, ids, mask, 9)[0]
    loss_and_gradients(ours, inputs | {KEPT: kept})
    loss_and_gradients(ours, inputs)
    ratios = ours._metrics["train"]["sampling/importance_sampling_ratio/min"]
    assert ratios[0] == pytest.approx(1.0, rel=1e-6)
    assert ratios[1] < 0.9  # over the vocabulary the mass that was kept is missing


def masked(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Rollouts whose sampler kept four ids of each token that the policy wrote."""
    made = rollouts(prompts, trainer)
    made["sampling_mask"] = [
        [[token, 3, 9, 2] if own else [] for token, own in zip(row, mask, strict=True)]
        for row, mask in zip(made["completion_ids"], made["env_mask"], strict=True)
    ]
    return made


@pytest.mark.parametrize("credit", [None, CounterfactualConfig()], ids=["plain", "credit"])
def test_the_mask_of_a_rollout_function_reaches_the_loss_and_the_old_log_probs(train, credit):
    recorded, record = record_generations()
    given = {"rollout_func": masked, "credit": credit, "packed_loss": True}
    whole = {"rollout_func": rollouts, "credit": credit, "packed_loss": True}
    options = {"num_iterations": 2, "max_steps": 2, "mask_truncated_completions": True}
    trained = train(recorded, trainer=given, **options)
    ((_, output, _),) = record
    ids, kept = output["completion_ids"], output[KEPT]
    logits = tiny_model()(torch.cat([output["prompt_ids"], ids], 1)).logits[:, -ids.shape[1] - 1 : -1].detach()
    for row, token in ((0, 0), (5, 3)):
        support = torch.tensor([int(ids[row, token]), 3, 9, 2])
        assert kept[row].take(slice(token, token + 1)).ids.tolist() == support.tolist()
        expected = logits[row, token, support].log_softmax(0)[0]
        assert output["old_per_token_logps"][row, token] == pytest.approx(expected.item(), abs=1e-5)
    assert logged(trained, "entropy")[0] < 1.4 < logged(train(trainer=whole, **options), "entropy")[0]  # ln 4


def test_vllm_inside_the_process_cuts_to_the_ids_that_it_lists(caplog):
    lists = [[[-0.2, -9999.0], [-1.0, -0.46]]], [[[5, 9], [7, 5]]]
    config = SimpleNamespace(max_logprobs=20, logprobs_mode="processed_logprobs")  # TRL names no other number
    vllm = SimpleNamespace(
        mode="colocate", llm=SimpleNamespace(llm_engine=SimpleNamespace(model_config=config)), top_k=-1,
        generate=lambda: ([[1]], [[5, 7]], *lists),
    )  # fmt: skip
    trainer = SimpleNamespace(vllm_generation=vllm, accelerator=PartialState(), beta=0)
    record_kept_ids(trainer)
    assert "vLLM keeps 20 ids or fewer; a server with --max-logprobs lists more" in caplog.text
    assert (vllm.logprobs, vllm.top_k) == (20, 20)
    assert vllm.generate()[2:] == ([[[-0.2], [-1.0]]], [[[5], [7]]])
    (kept,) = trainer._sampling_mask
    assert (kept.counts.tolist(), kept.ids.tolist()) == ([1, 2], [5, 7, 5])


def test_without_the_packed_loss_the_mask_is_trls_to_read(train):
    seen: list[Any] = []

    def reward(completions: list[Any], sampling_mask: Any = None, **kwargs: Any) -> list[float]:
        seen.append(sampling_mask)
        return seven(completions)

    train(trainer={"rollout_func": masked, "reward_funcs": reward})
    assert seen[0] is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda mask: mask[1:], "sampling_mask: expected the kept ids of 8 completions, got 7"),
        (lambda mask: [mask[0][:2], *mask[1:]], r"sampling_mask row 0: must hold offsets \(6,\) and ids"),
        (lambda mask: [*mask[:2], [[3, 9], *mask[2][1:]], *mask[3:]], "mask row 2, token 0: must hold the sampled"),
        (lambda mask: [[[999, *mask[0][0]], *mask[0][1:]], *mask[1:]], r"row \d+, token 0: ids must be in the vocabul"),
    ],
)
def test_masks_that_do_not_fit_are_named_by_row_and_token(train, change, message):
    def wrong(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        made = masked(prompts, trainer)
        return made | {"sampling_mask": change(made["sampling_mask"])}

    with pytest.raises(ValueError, match=message):
        train(trainer={"rollout_func": wrong, "packed_loss": True})


def test_a_mask_is_refused_with_a_reference_model(train):
    with pytest.raises(NotImplementedError, match=r"sampling_mask cannot be combined with beta=0\.1: log-probs"):
        train(trainer={"rollout_func": masked, "packed_loss": True, "peft_config": LORA}, beta=0.1)
