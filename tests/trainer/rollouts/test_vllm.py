"""The vLLM engine, against a stand-in of the server's HTTP contract: TRL's own client speaks to it."""

import socket

import pytest
import torch
from torch import nn

from cfa_kernels.rows import Rows
from cfa_kernels.scoring.training_forward import packed_logprobs
from tests.support.adapted import PROMPTS, SAMPLED, adapted, tiny, tokenizer
from tests.support.embedded import settings, updated
from tests.support.vllm_server import stand_in
from trainer.__main__ import main
from trainer.evaluate import evaluate
from trainer.rollouts import TransformersEngine, VllmEngine
from trainer.run import set_up
from trainer.step import draw

pytest.importorskip("requests", reason="TRL's client of a vLLM server needs requests (in the extra `test`)")

ENDS = [tokenizer().eos_token_id]
LIMIT = 1e-4


@pytest.fixture
def serve(monkeypatch):
    """Makes servers, and engines that use them."""

    def start(policy: nn.Module, model: nn.Module, fault: str = ""):
        server = stand_in(model, ENDS, monkeypatch, fault)
        return server, lambda: VllmEngine(policy, tokenizer(), server.url, LIMIT)

    return start


def other(**options) -> nn.Module:
    """The architecture of `tiny` with other weights: what a server was started with."""
    model = tiny(**options)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def test_a_server_has_the_merged_weights_and_completes_greedily_as_the_policy_does(serve) -> None:
    policy = adapted(tiny(tie_word_embeddings=True))
    server, engine = serve(policy, other(tie_word_embeddings=True))
    greedy = {"max_completion_length": 12}
    theirs, ours = (made(PROMPTS, **greedy) for made in (engine(), TransformersEngine(policy, tokenizer())))
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "truncated"):
        assert torch.equal(getattr(theirs, name), getattr(ours, name)), name
    assert (theirs.texts, theirs.logprobs) == (ours.texts, None)
    assert len(server.updates) == 2  # changed weights that it had to show, then the policy's
    assert server.requests[-1][1]["temperature"] == 0


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_log_probs_are_the_servers_and_a_key_is_a_seed(serve, top_p) -> None:
    policy = adapted(tiny(tie_word_embeddings=False), modules_to_save=["lm_head"])
    server, engine = serve(policy, other(tie_word_embeddings=False))
    made, options = engine(), SAMPLED | {"temperature": 0.7, "top_p": top_p}
    sampled, again = made(PROMPTS, **options), made(PROMPTS[1:2], **options | {"keys": SAMPLED["keys"][1:2]})
    assert again.texts == sampled.texts[1:2]  # what else is in the batch does not matter to the stand-in
    assert len({body["seed"] for path, body in server.requests[-5:]}) == 4
    assert sampled.nucleus == top_p
    rows = sampled.ids()
    expected = packed_logprobs(
        policy, Rows([torch.tensor(p) for p in PROMPTS], list(map(torch.tensor, rows))), temperature=0.7
    )
    for row, ours in zip(sampled.logprobs, expected, strict=True):
        above = row[: len(ours)] - ours
        assert above.min() >= -1e-5
        assert above.max() <= 1e-5 if top_p == 1 else 0.01 < above.max() <= -torch.tensor(top_p).log() + 1e-5
        assert not row[len(ours) :].any()


def test_weights_are_sent_again_only_after_they_have_changed(serve) -> None:
    policy = tiny()
    server, engine = serve(policy, other())
    made = engine()
    made(PROMPTS, **SAMPLED)
    assert len(server.updates) == 2
    with torch.no_grad():
        policy.lm_head.weight.mul_(1.5)
    made.weights_changed()
    for _ in range(2):
        made(PROMPTS, **SAMPLED)
    assert len(server.updates) == 3
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), server.model.parameters(), strict=True))
    assert [path for path, _ in server.requests if "prefix" in path] == ["/reset_prefix_cache"] * 3


@pytest.mark.parametrize("started_with", [tiny, other])
def test_log_probs_that_are_not_those_of_the_weights_are_named(serve, started_with) -> None:
    policy = tiny()
    before = [p.clone() for p in policy.parameters()]
    _, engine = serve(policy, started_with(), "keeps its weights")
    with pytest.raises(ValueError, match=r"log-probs of the vLLM server at http://127.* are not those of the weights"):
        engine()
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("no log-probs", ConnectionError, "the first prompt: the server at .* gave no log-prob for each token"),
        ("other tokens", ConnectionError, "the first prompt: the server at .* gave no log-prob for each token"),
        ("no development mode", ConnectionError, "did not tell its configuration: .*VLLM_SERVER_DEV_MODE=1"),
        ("refuses", ConnectionError, "did not complete the first prompt: .*maximum context length is 8 tokens"),
        ("raw_logprobs", ValueError, "gives raw_logprobs, .*--logprobs-mode processed_logprobs"),
    ],
)
def test_a_server_that_cannot_be_used_is_named_before_a_run_starts(serve, fault, error, message) -> None:
    _, engine = serve(tiny(), tiny(), fault)
    with pytest.raises(error, match=message):
        engine()


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("stops early", ConnectionError, r"^p\d: the server ended it after 1 of 12 tokens, by \[\d+\]; completions of"),
        ("not a number", FloatingPointError, r"^p\d.* of 4\): the model's logits are not finite \(in p\d from token"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_is_named(serve, fault, error, message) -> None:
    _, engine = serve(tiny(), tiny(), fault)
    made = engine()
    with pytest.raises(error, match=message):
        made(PROMPTS, **SAMPLED, names=[f"p{b}" for b in range(4)])


@pytest.mark.parametrize("listens", [False, True], ids=["nobody there", "no answer"])
def test_a_server_that_does_not_answer_ends_the_program_with_one_line(tmp_path, capsys, monkeypatch, listens) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("trainer.rollouts.vllm.START_SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        argv = ["--rollout_engine=vllm", f"--vllm_server_base_url={url}"]
        assert main(["--device=cpu", "--train_problems=8", f"--output_dir={tmp_path / 'run'}", *argv]) == 1
    printed = capsys.readouterr().err
    assert f"error: vllm_server_base_url: no vLLM server answers at {url} within 0.2 seconds" in printed


def test_a_step_samples_from_the_server_and_the_next_one_from_the_weights_it_made(serve) -> None:
    policy = set_up(settings()).policy
    server, _ = serve(policy, policy)
    argv = [
        "--rollout_engine=vllm", f"--vllm_server_base_url={server.url}", "--max_completion_length=16", "--top_p=0.9",
        "--temperature=1.5", "--importance_sampling_clip_max=3", "--no_mask_truncated_completions",
    ]  # fmt: skip
    trainer = set_up(settings(*argv))
    keys = [(0, 1, 0, g) for g in range(8)]
    first = draw(trainer, keys)
    metrics = updated(trainer, first)[1]
    assert metrics["sampling/gap"] < 1e-4 < metrics["sampling/sampling_logp_difference/max"] <= 0.106  # -log(0.9)
    assert 0.9 - 1e-5 <= metrics["sampling/importance_sampling_ratio/min"] < 0.999
    evaluate(trainer.engine, trainer.held_out[:1], trainer.held_out_prompts[:1], settings("--max_completion_length=4"))
    assert len(server.updates) == 3
    assert all(torch.equal(a, b) for a, b in zip(trainer.policy.parameters(), server.model.parameters(), strict=True))
