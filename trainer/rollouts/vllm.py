"""Complete prompts with a vLLM server that has the policy's weights, reached through TRL's client (trl 1.16).

A server is only trusted after it has shown that it computes with the weights that it was sent.
"""

import contextlib
import functools
import math
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from cfa_kernels.loss.off_policy import open_choice, sampling_gaps
from cfa_kernels.model.merged import CannotMerge, merged_adapters
from cfa_kernels.model.parts import causal_lm
from cfa_kernels.rows import Rows
from cfa_kernels.scoring.packed import packed_logprobs

from ..extras import installing
from .engine import Rollouts, end_ids, lengths_before, notes_on_ends, require_finite_logits

_AT_ONCE = 64  # requests; as many as the client keeps connections
START_SECONDS = 240.0
_REQUEST_SECONDS = 600.0  # the client sets no limit: a server that is stuck would be waited for without end
_MODE = "processed_logprobs"


class VllmEngine:
    """A vLLM server as an engine: weights are sent before sampling if they have changed."""

    def __init__(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, url: str, limit: float = math.inf,
        thought_tags: str = "", stop: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Reach the server at `url`, open the channel for weights, and see that it computes with those it is sent.

        `limit` is the largest gap between the server's log-probs and those of `model`, a policy in eval mode, nats;
        `thought_tags` as in `AnswerRules`, `stop` as in `lengths_before`.
        Raises `ImportError`, `NotImplementedError` without a GPU, `ConnectionError` and `ValueError`, which say why.
        """
        self._model, self._tokenizer, self._url = model, tokenizer, url.rstrip("/")
        self._thought_tags, self._stop = thought_tags, list(stop)
        self._ends, self._stale = end_ids(model, tokenizer), True
        self.notes = ["rollout_engine: a run with vLLM does not repeat to the token (docs/rollouts.md)"]
        self.notes += notes_on_ends(model, tokenizer)
        try:
            from trl.generation.vllm_client import VLLMClient

            with self._named("say which model it serves"):
                self._client = VLLMClient(base_url=self._url)
        except ImportError as absent:
            raise ImportError(f"rollout_engine: vllm: {absent}: {installing('vllm')}") from absent
        request = functools.partial(self._client.session.request, timeout=_REQUEST_SECONDS)
        self._client.session.request = request  # type: ignore[method-assign]
        with self._named("tell its configuration"):
            mode = self._client.get_server_info()["model_config"]["logprobs_mode"]
        if mode != _MODE:
            said = f"the vLLM server at {self._url} gives {mode}, which are not at the temperature"
            raise ValueError(f"rollout_engine: {said}; start it with --logprobs-mode {_MODE}")
        with self._named("open the channel for weights"):
            self._client.init_communicator(device=next(model.parameters()).device)
        self._verify(limit)

    def __call__(
        self, prompts: Sequence[Sequence[int]], *, max_completion_length: int,
        keys: Sequence[Sequence[int]] | None = None, temperature: float = 1.0, top_p: float = 1.0,
        names: Sequence[str] | None = None,
    ) -> Rollouts:  # fmt: skip
        """Complete prompts as `Engine` says, with as many requests; a key gives the seed of its request."""
        names = names or [f"sample {b}" for b in range(len(prompts))]
        options: dict[str, Any] = {"max_tokens": max_completion_length, "temperature": 0.0}
        if keys is not None:
            options |= {"temperature": temperature, "top_p": top_p}

        def complete(b: int) -> tuple[list[int], list[float]]:
            special: dict[str, Any] = {"stop_token_ids": self._ends}
            if self._stop:
                special["stop"] = self._stop
            if keys is not None:
                special["seed"] = int(np.random.default_rng(list(keys[b])).integers(2**53))
            return self._complete(names[b], prompts[b], special, **options)

        if self._stale:
            self._send()
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            completions, logprobs = zip(*pool.map(complete, range(len(prompts))), strict=True)
        sampled = [torch.tensor(row, dtype=torch.float32) for row in logprobs]
        rollouts = Rollouts.of(
            prompts, completions, sampled, self._ends, self._tokenizer, top_p, self._thought_tags, stop=self._stop
        )
        require_finite_logits(rollouts.logprobs, names)
        return rollouts

    def weights_changed(self) -> None:
        """Send the weights again before the next completion."""
        self._stale = True

    def _send(self) -> None:
        try:
            with merged_adapters(self._model), self._named("take the weights"):
                prefix, saved = getattr(self._model, "prefix", None), "modules_to_save.default."  # PEFT's
                weights = {  # by the names of the plain model, tied ones once
                    name.replace(".base_layer.", ".").replace(saved, ""): parameter.data
                    for name, parameter in causal_lm(self._model).named_parameters()
                    if "original_module." not in name and (prefix is None or prefix not in name)
                }
                types = [(name, str(w.dtype).removeprefix("torch."), list(w.shape)) for name, w in weights.items()]
                self._client.update_named_params(types, iter(weights.items()))
                self._client.reset_prefix_cache()  # holds what other weights computed
        except CannotMerge as problem:
            raise ValueError(f"rollout_engine: a vLLM server takes merged weights, and {problem}") from problem
        self._stale = False

    @torch.no_grad()
    def _verify(self, limit: float) -> None:
        # Weights arrive if the server computes with some that give every token another log-prob.
        prompt = self._tokenizer("What is 3 + 4? Add 3 and 4.")["input_ids"]
        weight = causal_lm(self._model).get_output_embeddings().weight.data
        values, greedy = weight.clone(), {"max_tokens": 16, "temperature": 0.0}
        try:
            weight.mul_(torch.tensor(0.5, dtype=weight.dtype))
            self._send()
            ids, logprobs = self._complete("the first prompt", prompt, {"ignore_eos": True}, **greedy)
            sampled, row = torch.tensor(logprobs), Rows([torch.tensor(prompt)], [torch.tensor(ids)])
            ours = packed_logprobs(self._model, row)[0].cpu()  # type: ignore[union-attr]
        finally:
            weight.copy_(values)
        self._send()
        if not (gap := float(sampling_gaps(sampled, ours).sum() / open_choice(sampled).sum())) <= limit:
            raise ValueError(
                f"rollout_engine: log-probs of the vLLM server at {self._url} are not those of the weights that it was "
                f"sent: {gap:.3g} nats apart (at most {limit:.3g}). Restart it by the policy's model and dtype"
            )

    def _complete(
        self, name: str, prompt: Sequence[int], special: dict[str, Any], **options: Any
    ) -> tuple[list[int], list[float]]:
        with self._named(f"complete {name}"):
            answer: Any = self._client.generate([list(prompt)], logprobs=0, generation_kwargs=special, **options)
        (ids,), logprobs = answer["completion_ids"], answer["logprobs"]
        if logprobs is None or [tokens[0] for tokens in answer["logprob_token_ids"][0]] != ids:
            raise ConnectionError(f"{name}: the server at {self._url} gave no log-prob for each token")
        ended = {*ids[-1:]} & {*self._ends} or lengths_before([ids], self._tokenizer, self._stop)[0]
        if len(ids) < (most := options["max_tokens"]) and not ended:
            said = f"the server ended it after {len(ids)} of {most} tokens, by {ids[-1:]}"
            raise ConnectionError(f"{name}: {said}; completions of the policy end by one of {self._ends}")
        return ids, [math.nan if values[0] is None else values[0] for values in logprobs[0]]  # JSON knows no nan

    @contextlib.contextmanager
    def _named(self, task: str) -> Iterator[None]:
        try:  # the client raises plain exceptions
            yield
        except (ImportError, NotImplementedError):  # no vLLM, no GPU
            raise
        except Exception as problem:
            said = f"rollout_engine: the vLLM server at {self._url} did not {task}: {problem}"
            raise ConnectionError(said) from problem


def await_server(url: str) -> None:
    """Wait until a server is up; `ConnectionError` after `START_SECONDS`."""
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=max(until - time.monotonic(), 0.1)):
                return
        except OSError as problem:
            if time.monotonic() >= until:
                raise ConnectionError(
                    f"vllm_server_base_url: no vLLM server answers at {url} within {START_SECONDS:g} seconds "
                    f"({problem}); docs/rollouts.md says how to start one"
                ) from problem
        time.sleep(min(1.0, START_SECONDS))
