"""What the vLLM engine says of servers that do something wrong, by a stand-in that answers TRL's own client.

Over NCCL, which a CPU lacks, weights come by a queue; what is announced is checked against them. A real server is used
in test_vllm_served.py.
"""

import json
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.support.adapted import PROMPTS, adapted, tiny, tokenizer
from trainer.__main__ import main
from trainer.rollouts.in_process import TransformersEngine
from trainer.rollouts.vllm import VllmEngine

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
        except (ValueError, LookupError, RuntimeError) as problem:
            status = {KeyError: 404, RuntimeError: 500}
            content, response.status_code = {"error": str(problem)}, status.get(type(problem), 400)
        response._content = json.dumps(content).encode()
        return response

    def read(self) -> dict[str, Any]:
        mode = self.fault if self.fault == "raw_logprobs" else "processed_logprobs"
        dtype = "torch.bfloat16" if self.fault == "bfloat16" else "torch.float64"
        served = {"logprobs_mode": mode, "model": "no/model", "dtype": dtype, "max_logprobs": 20}
        served["return_sampling_mask"] = self.fault == "masks"
        config = {"weight_transfer_config": {"backend": "nccl"}, "model_config": served, "lora_config": None}
        answers = {"/v1/models": {"data": [{"id": "served"}]}, "/get_world_size": {"world_size": 1}}
        return answers | ({} if self.fault == "no development mode" else {"/server_info": {"vllm_config": config}})

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.requests.append((path, body))
        if path == "/update_weights":
            self.update(**body["update_info"])
        if path == "/collective_rpc":
            if self.fault == "breaks":
                raise RuntimeError("Call to collective_rpc method failed: shapes differ")
            self.load(Path(body["kwargs"]["weights_path"]))
        if path == "/reset_prefix_cache":
            return {"success": self.fault != "keeps its cache"}
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
        return {"choices": choices}

    def update(self, names: list[str], dtype_names: list[str], shapes: list[list[int]], packed: bool = True) -> None:
        own = dict(self.model.named_parameters())
        for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
            sent, weight = self.channel.get(timeout=10)
            assert (sent, f"torch.{dtype}", shape) == (name, str(weight.dtype), list(weight.shape))
            if self.fault != "keeps its weights":
                own[name].data.copy_(weight)
        self.updates.append(names)

    def load(self, folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        if self.fault != "keeps its weights":
            self.model.load_state_dict(weights, strict=False)
        self.updates.append([*weights])

    @torch.no_grad()
    def complete(self, prompt: list[int], body: dict[str, Any]) -> tuple[list[int], list[float]]:
        ids, logprobs = list(prompt), []
        while len(logprobs) < body["max_tokens"]:
            scores = self.model(torch.tensor([ids])).logits[0, -1].double()
            token = int(scores.argmax())
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
        return server, lambda limit=LIMIT, **options: VllmEngine(policy, tokenizer(), server.url, limit, **options)

    return start


def other(**options) -> nn.Module:
    """The architecture of `tiny` with other weights: what a server was started with."""
    model = tiny(**options)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def untied(**options) -> nn.Module:
    """The model of `tiny` with a copy of its tied output layer, which then stays as it is."""
    model = tiny(**options)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


@pytest.mark.parametrize("how", ["nccl", "file"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_server_has_the_merged_weights_by_the_names_of_the_plain_model(serve, how, tied) -> None:
    saved = {} if tied else {"modules_to_save": ["lm_head"]}
    policy = adapted(tiny(tie_word_embeddings=tied), **saved)
    server, engine = serve(policy, other(tie_word_embeddings=tied))
    greedy = {"max_completion_length": 12}
    theirs, ours = (made(PROMPTS, **greedy) for made in (engine(weights=how), TransformersEngine(policy, tokenizer())))
    assert (theirs.texts, theirs.ids()) == (ours.texts, ours.ids())
    assert len(server.updates) == 2  # changed weights that it had to show, then the policy's
    assert {*server.updates[1]} == {name for name, _ in server.model.named_parameters()}


def test_a_server_that_lists_fewer_log_probs_cuts_a_nucleus_and_says_so(serve) -> None:
    server, engine = serve(tiny(), tiny())
    made = engine()
    assert "top_p: nuclei are cut to 20 ids; --max-logprobs 256 lets the server list more" in made.notes
    rollouts = made(PROMPTS, max_completion_length=3, keys=[(3, i) for i in range(4)], top_p=0.9)
    body = server.requests[-1][1]
    assert (body["top_k"], body["logprobs"], rollouts.most_kept) == (20, 20, 20)


def test_weights_are_sent_again_only_after_they_have_changed(serve) -> None:
    policy = tiny()
    server, engine = serve(policy, other())
    made = engine()
    made(PROMPTS, max_completion_length=4)
    assert len(server.updates) == 2
    with torch.no_grad():
        policy.lm_head.weight.mul_(1.5)
    made.weights_changed()
    for _ in range(2):
        made(PROMPTS, max_completion_length=4)
    assert len(server.updates) == 3
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), server.model.parameters(), strict=True))
    assert [path for path, _ in server.requests if "prefix" in path] == ["/reset_prefix_cache"] * 3


@pytest.mark.parametrize(
    ("started_with", "fault", "why"),
    [
        (tiny, "keeps its weights", "It does not take new weights"), (other, "keeps its weights", "Restart it by the"),
        (untied, "", "It keeps its old output layer, .*tie_word_embeddings=False"),
    ],
)  # fmt: skip
def test_log_probs_that_are_not_those_of_the_weights_are_named(serve, started_with, fault, why) -> None:
    policy = tiny(tie_word_embeddings=True)
    before = [p.clone() for p in policy.parameters()]
    _, engine = serve(policy, started_with(tie_word_embeddings=True), fault)
    with pytest.raises(ValueError, match=rf"log-probs of the vLLM server at http://127.* nats apart .*{why}"):
        engine()
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def test_an_error_of_the_server_is_said_once_and_the_request_not_repeated(serve, monkeypatch) -> None:
    monkeypatch.setattr("trainer.rollouts.vllm._RESETS", 1)
    for fault, said in {
        "breaks": "/collective_rpc gave 500, .*shapes differ",
        "keeps its cache": "keeps its prefix",
    }.items():
        server, engine = serve(tiny(), tiny(), fault)
        with pytest.raises(
            ConnectionError, match=rf"take weights by vllm_weights=file \(it serves no/model in .*{said}"
        ):
            engine()
        assert [path for path, _ in server.requests].count("/collective_rpc") == 1


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("other tokens", ConnectionError, "the first prompt: the server at .* gave no log-prob for each token"),
        ("no development mode", ConnectionError, "did not tell its configuration: .*VLLM_SERVER_DEV_MODE=1"),
        ("refuses", ConnectionError, "did not complete the first prompt: .*maximum context length is 8 tokens"),
        ("masks", ValueError, "server at .* returns sampling masks; start it without --return-sampling-mask"),
        ("raw_logprobs", ValueError, "gives raw_logprobs, .*--logprobs-mode processed_logprobs"),
        ("bfloat16", ValueError, "serves no/model in bfloat16, whose rounding .*--dtype float32, or raise max_samp"),
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
        made(PROMPTS, max_completion_length=12, names=[f"p{b}" for b in range(4)])


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
