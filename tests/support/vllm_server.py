"""A stand-in for `vllm serve`: its HTTP contract on the loopback, as TRL's client uses it, with a model in the process.

Weights come over a queue in NCCL's place, for a CPU has none; what is announced over HTTP is checked against it.
"""

import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


class VllmServer(ThreadingHTTPServer):
    """Answers for `model`, does `fault` wrong, and keeps (path, body) of all posts and the names of all updates."""

    daemon_threads = True

    def __init__(self, model: nn.Module, ends: list[int], fault: str = "", mode: str = "processed_logprobs") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model, self.ends, self.fault, self.mode = model.eval(), ends, fault, mode
        self.channel = queue.Queue[tuple[str, torch.Tensor]]()
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.updates: list[list[str]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def update(self, names: list[str], dtype_names: list[str], shapes: list[list[int]], packed: bool = True) -> None:
        own = dict(self.model.named_parameters())
        for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
            sent, weight = self.channel.get(timeout=10)
            assert (sent, f"torch.{dtype}", shape) == (name, str(weight.dtype), list(weight.shape))
            if name not in own:
                raise ValueError(f"There is no module or parameter named {name!r}")
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


class _Handler(BaseHTTPRequestHandler):
    server: VllmServer

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        config = {"weight_transfer_config": {"backend": "nccl"}, "model_config": {"logprobs_mode": self.server.mode}}
        answers = {
            "/health": {},
            "/v1/models": {"data": [{"id": "served"}]},
            "/server_info": {"vllm_config": config},
            "/get_world_size": {"world_size": 1},
        }
        if self.server.fault == "no answer" or (self.server.fault == "no development mode" and path == "/server_info"):
            return self.answer({"error": "Not Found"}, 404)
        return self.answer(answers[path])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        with self.server.lock:
            self.server.requests.append((self.path, body))
            try:
                self.answer(self.result(body))
            except ValueError as problem:
                self.answer({"error": str(problem)}, 400)

    def result(self, body: dict[str, Any]) -> dict[str, Any]:
        fault = self.server.fault
        if self.path == "/update_weights":
            self.server.update(**body["update_info"])
        if self.path != "/v1/completions":
            return {"success": True}
        if fault == "refuses":
            raise ValueError("This model's maximum context length is 8 tokens")
        choices = []
        for prompt in body["prompt"]:
            ids, logprobs = self.server.complete(prompt, body)
            if fault == "stops early" and not body.get("ignore_eos"):
                ids, logprobs = ids[:1], logprobs[:1]
            if fault == "not a number" and not body.get("ignore_eos"):
                logprobs[-1] = float("nan")
            names = [f"token_id:{token + (fault == 'other tokens')}" for token in ids]
            told = {"tokens": names, "token_logprobs": logprobs, "top_logprobs": [None] * len(ids)}
            given = None if fault == "no log-probs" else told
            choices.append({"prompt_token_ids": prompt, "token_ids": ids, "logprobs": given})
        return {"choices": choices}

    def answer(self, content: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(
    model: nn.Module, ends: list[int], monkeypatch: Any, fault: str = "", **options: Any
) -> Iterator[VllmServer]:
    """Serve `model` while the context lasts; TRL's client takes vLLM for installed and sends weights to the server."""
    from trl.generation import vllm_client

    server = VllmServer(model, ends, fault, **options)

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
        "NCCLWeightTransferEngine": Transfer,
        "NCCLTrainerSendWeightsArgs": SimpleNamespace,
    }.items():
        monkeypatch.setattr(vllm_client, name, value, raising=False)
    monkeypatch.setattr(vllm_client.VLLMClient, "init_communicator", lambda self, device: opened(self, "cuda"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
