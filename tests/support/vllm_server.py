"""A stand-in for `vllm serve`: it answers TRL's client as over HTTP, in the process, with a model of its own.

Weights come over a queue in NCCL's place, for a CPU has none; what is announced is checked against them.
"""

import json
import queue
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import torch
from requests import PreparedRequest, Response
from requests.adapters import BaseAdapter
from torch import nn


class VllmServer(BaseAdapter):
    """Answers for `model`, does `fault` wrong, and keeps (path, body) of all posts and the names of all updates."""

    url = "http://127.0.0.1:8000"

    def __init__(self, model: nn.Module, ends: list[int], fault: str = "") -> None:
        super().__init__()
        self.model, self.ends, self.fault = model.eval(), ends, fault
        self.channel = queue.Queue[tuple[str, torch.Tensor]]()
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.updates: list[list[str]] = []
        self.lock = threading.Lock()

    def close(self) -> None:
        pass

    def send(self, request: PreparedRequest, **_: Any) -> Response:
        path, response, content = urlsplit(request.url).path, Response(), dict[str, Any]()
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
            if self.fault == "not a number" and not body.get("ignore_eos"):
                logprobs[-1] = float("nan")
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


def stand_in(model: nn.Module, ends: list[int], monkeypatch: Any, fault: str = "") -> VllmServer:
    """Serve `model`; TRL's client takes vLLM for installed and sends weights to the server."""
    from trl.generation import vllm_client

    server = VllmServer(model, ends, fault)

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
    return server
