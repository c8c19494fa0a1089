"""The vLLM engine, against a stand-in for `vllm serve`, which answers TRL's own client as over HTTP.

Weights come over a queue in NCCL's place, for a CPU has none; what is announced is checked against them.
"""

import json
import queue
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from torch import nn

from cfa_kernels.rows import Rows
from cfa_kernels.scoring.packed import packed_logprobs
from tests.support.adapted import PROMPTS, SAMPLED, adapted, tiny, tokenizer
from tests.support.embedded import settings, updated
from trainer.__main__ import main
from trainer.evaluate import evaluate
from trainer.rollouts.in_process import TransformersEngine
from trainer.rollouts.vllm import VllmEngine
from trainer.run import set_up

requests = pytest.importorskip("requests", reason="TRL's client of a vLLM server needs it (in the extra `test`)")

LIMIT = 1e-4


class VllmServer(requests.adapters.BaseAdapter):
    """Answers for `model`, does `fault` wrong, and keeps (path, body) of all posts and the names of all updates."""

    url = "http://127.0.0.1:8000"

    def __init__(self, model: nn.Module, fault: str) -> None:
        super().__init__()
        self.model, self.fault = model.eval(), fault
        self.channel = queue.Queue[tuple[str, torch.Tensor]]()
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.updates: list[list[str]] = []
        self.lock = threading.Lock()

    def close(self) -> None:
        pass

    def send(self, request: requests.PreparedRequest, **_: Any) -> requests.Response:
        path, response, content = urlsplit(request.url).path, requests.Response(), dict[str, Any]()
        try:
            with self.lock:
                body = json.loads(request.body or "{}")
                content = self.read()[path] if request.method == "GET" else self.post(path, body)
            response.status_code = 200
        except (ValueError, LookupError) as problem:
            content, response.status_code = {"error": str(problem)}, 404 if isinstance(problem, KeyError) else 400
        response._content = json.dumps(content).encode()
        return response

    def read(self) -> dict[str, Any]:
        mode = self.fault if self.fault == "raw_logprobs" else "processed_logprobs"
        config = {"weight_transfer_config": {"backend": "nccl"}, "model_config": {"logprobs_mode": mode}}
        answers = {"/v1/models": {"data": [{"id": "served"}]}, "/get_world_size": {"world_size": 1}}
        return answers | ({} if self.fault == "no development mode" else {"/server_info": {"vllm_config": config}})

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.requests.append((path, body))
        if path == "/update_weights":
            self.update(**body["update_info"])
        if path != "/v1/completions":
            return {"success": True}
        if self.fault == "refuses":
            raise ValueError("This model's maximum context length is 8 tokens")
        choices = []
        for prompt in body["prompt"]:
            ids, logprobs = self.complete(prompt, body)
            if self.fault == "stops early" and not body.get("ignore_eos"):
                ids, logprobs = ids[:1], logprobs[:1]
            names = [f"token_id:{token + (self.fault == 'other tokens')}" for token in ids]
            values = {"tokens": names, "token_logprobs": logprobs, "top_logprobs": [None] * len(ids)}
            choices.append({"prompt_token_ids": prompt, "token_ids": ids, "logprobs": values})
            if self.fault == "no log-probs":
                choices[-1]["logprobs"] = None
        return {"choices": choices}

    def update(self, names: list[str], dtype_names: list[str], shapes: list[list[int]], packed: bool = True) -> None:
        own = dict(self.model.named_parameters())
        for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
            sent, weight = self.channel.get(timeout=10)
            assert (sent, f"torch.{dtype}", shape) == (name, str(weight.dtype), list(weight.shape))
            if self.fault != "keeps its weights":
                own[name].data.copy_(weight)
        self.updates.append(names)

    @torch.no_grad()
    def complete(self, prompt: list[int], body: dict[str, Any]) -> tuple[list[int], list[float]]:
        """Sample as vLLM does by `processed_logprobs`: of the distribution after temperature and nucleus."""
        generator = torch.Generator().manual_seed(body.get("seed", 0) % 2**63)
        ids, logprobs = list(prompt), []
        while len(logprobs) < body["max_tokens"]:
            scores = self.model(torch.tensor([ids])).logits[0, -1].double()
            if body["temperature"] == 0:
                scores, token = scores, int(scores.argmax())
            else:
                scores = scores / body["temperature"]
                rising, order = scores.sort()
                scores[order[rising.softmax(-1).cumsum(-1) <= 1 - body["top_p"]]] = -torch.inf
                token = int(torch.multinomial(scores.softmax(-1), 1, generator=generator))
            logprobs.append(float(scores.log_softmax(-1)[token]))
            ids.append(token)
            if not body.get("ignore_eos") and token in body["stop_token_ids"]:
                break
        return ids[len(prompt) :], logprobs


@pytest.fixture
def serve(monkeypatch):
    """Start servers that TRL's client takes for vLLM, and engines that use them."""
    from trl.generation import vllm_client

    def start(policy: nn.Module, model: nn.Module, fault: str = ""):
        server = VllmServer(model, fault)

        class Transfer:
            @staticmethod
            def trainer_init(init_info: dict[str, Any]) -> Any:
                assert (init_info["rank_offset"], init_info["world_size"]) == (1, 2)
                return SimpleNamespace(group=SimpleNamespace())

            @staticmethod
            def trainer_send_weights(iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: Any) -> None:
                for name, weight in iterator:
                    server.channel.put((name, weight.clone()))

        opened = vllm_client.VLLMClient.init_communicator
        for name, value in {
            "is_vllm_available": lambda *_, **__: True,
            "get_ip": lambda: "127.0.0.1",
            "HTTPAdapter": lambda **_: server,
            "NCCLWeightTransferEngine": Transfer,
            "NCCLTrainerSendWeightsArgs": SimpleNamespace,
        }.items():
            monkeypatch.setattr(vllm_client, name, value, raising=False)
        monkeypatch.setattr(vllm_client.VLLMClient, "init_communicator", lambda self, device: opened(self, "cuda"))
        monkeypatch.setattr(vllm_client.VLLMClient, "check_server", lambda *_, **__: None)
        monkeypatch.setattr("trainer.run.await_server", lambda _: None)
        return server, lambda **options: VllmEngine(policy, tokenizer(), server.url, LIMIT, **options)

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
    assert (theirs.texts, theirs.ids()) == (ours.texts, ours.ids())
    assert torch.equal(theirs.truncated, ours.truncated)
    assert len(server.updates) == 2  # changed weights that it had to show, then the policy's
    assert server.requests[-1][1]["temperature"] == 0


def test_stop_strings_are_the_servers_and_what_spells_them_is_cut_off(serve) -> None:
    policy = tiny()
    whole = TransformersEngine(policy, tokenizer())(PROMPTS, max_completion_length=12)
    stop = [tokenizer().decode(row[3:5]) for row in whole.ids()]
    server, engine = serve(policy, other())
    theirs = engine(stop=stop)(PROMPTS, max_completion_length=12)
    assert server.requests[-1][1]["stop"] == stop
    assert theirs.ids() == TransformersEngine(policy, tokenizer(), stop=stop)(PROMPTS, max_completion_length=12).ids()
    assert max(theirs.rows.lengths) <= 4
    assert not theirs.truncated.any()


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
        above = row - ours
        assert above.min() >= -1e-5
        assert above.max() <= 1e-5 if top_p == 1 else 0.01 < above.max() <= -torch.tensor(top_p).log() + 1e-5


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


def test_a_completion_that_the_server_cut_short_is_named(serve) -> None:
    _, engine = serve(tiny(), tiny(), "stops early")
    made = engine()
    message = r"^p\d: the server ended it after 1 of 12 tokens, by \[\d+\]; completions of"
    with pytest.raises(ConnectionError, match=message):
        made(PROMPTS, **SAMPLED, names=[f"p{b}" for b in range(4)])


def test_a_server_that_does_not_answer_ends_the_program_with_one_line(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("trainer.rollouts.vllm.START_SECONDS", 0.2)
    monkeypatch.setattr("trainer.run.load_policy", lambda *_, **__: pytest.fail("the model was loaded before"))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
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
    first = trainer.sample(keys)
    metrics = updated(trainer, first)[1]
    assert metrics["sampling/gap"] < 1e-4 < metrics["sampling/sampling_logp_difference/max"] <= 0.106  # -log(0.9)
    assert 0.9 - 1e-5 <= metrics["sampling/importance_sampling_ratio/min"] < 0.999
    evaluate(trainer.engine, trainer.held_out[:1], trainer.held_out_prompts[:1], settings("--max_completion_length=4"))
    assert len(server.updates) == 3
    assert all(torch.equal(a, b) for a, b in zip(trainer.policy.parameters(), server.model.parameters(), strict=True))
