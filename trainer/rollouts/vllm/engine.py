"""Complete prompts with a vLLM server that has the policy's weights, reached through TRL's client.

The client speaks vLLM's HTTP interface and passes weights by NCCL (`trl.generation.vllm_client`, trl 1.16). A server is
only trusted after it has shown that it computes with the weights that it was sent.
"""

import contextlib
import dataclasses
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
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from trainer.rollouts.engine import Rollouts, end_ids, gap_to_policy
from trainer.rollouts.in_process import require_finite
from trainer.rollouts.merged import CannotMerge, merged_adapters
from trainer.rollouts.settings import RolloutSettings
from trainer.rollouts.vllm.weights import halved_head, served_weights

_AT_ONCE = 64  # requests; as many as the client keeps connections
_ASKED, _ANSWERED = "What is 3 + 4? Add 3 and 4.", 16  # prompt, and tokens, that a server shows its weights with
_MODE = "processed_logprobs"


class VllmEngine:
    """A vLLM server as an engine: weights are sent before sampling where they have changed.

    Attributes:
        notes: what does not hold for completions of a server.
    """

    def __init__(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, settings: RolloutSettings, limit: float = math.inf
    ) -> None:
        """Reach the server, open the channel for weights, and see that those sent are those it computes with.

        Args:
            model: the policy, in eval mode; NCCL needs it on a GPU.
            tokenizer: the policy's.
            settings: those of the server are read.
            limit: largest gap between the server's log-probs and the policy's, as of `trainer.checks`, nats.

        Raises:
            ImportError: trl, vllm or requests is not installed.
            ConnectionError: the server does not answer, or refuses.
            NotImplementedError: the policy is not on a GPU.
            ValueError: the server was not started as this needs, weights do not arrive, or its log-probs are not those
                of the weights it was sent.
        """
        self._model, self._tokenizer, self._url = model, tokenizer, settings.vllm_server_base_url.rstrip("/")
        self._ends = end_ids(model, tokenizer)
        self._stale = True
        self.notes = [
            "rollout_engine: vLLM draws by a seed that comes from a completion's key; what else it decodes at that "
            "time moves log-probs by rounding, so a run does not repeat to the token",
            "rollout_engine: vLLM's log-probs are over the nucleus (top_p), up to -log(top_p) nats above the update's; "
            "sampling/gap leaves that out",
        ]
        self._client: Any = self._connected(settings)
        self._verify(limit)

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_completion_length: int,
        keys: Sequence[Sequence[int]] | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        names: Sequence[str] | None = None,
    ) -> Rollouts:
        """Complete prompts as `Engine` says, with as many requests; a key gives the seed of its request.

        Raises:
            NonFiniteLogits: a log-prob is not a number; the message names prompt and token.
            ConnectionError: the server does not answer, refuses, or answers something else than was asked for; the
                message names the prompt.
        """
        called = names or [f"sample {b}" for b in range(len(prompts))]
        options: dict[str, Any] = {"max_tokens": max_completion_length, "temperature": 0.0}
        if keys is not None:
            options |= {"temperature": temperature, "top_p": top_p}

        def complete(b: int) -> tuple[list[int], list[float]]:
            special: dict[str, Any] = {"stop_token_ids": self._ends}
            if keys is not None:
                special["seed"] = int(np.random.default_rng(list(keys[b])).integers(2**53))
            return self._complete(called[b], prompts[b], special, **options)

        if self._stale:
            self._send()
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = list(pool.map(complete, range(len(prompts))))
        for name, (ids, _) in zip(called, found, strict=True):
            if len(ids) < max_completion_length and not {*ids[-1:]} & {*self._ends}:
                raise ConnectionError(
                    f"{name}: the server ended it after {len(ids)} of {max_completion_length} tokens, by {ids[-1:]}; "
                    f"completions of the policy end by one of {self._ends}"
                )
        device = next(self._model.parameters()).device
        rollouts = Rollouts.padded(prompts, [ids for ids, _ in found], self._ends, self._tokenizer, device)
        logprobs = pad_sequence([torch.tensor(row, dtype=torch.float32) for _, row in found], True).to(device)
        require_finite(logprobs.isfinite(), rollouts, called)
        if keys is None:
            return rollouts
        return dataclasses.replace(rollouts, logprobs=logprobs, nucleus=top_p)

    def weights_changed(self) -> None:
        """Send the weights again before the next completion."""
        self._stale = True

    def _connected(self, settings: RolloutSettings) -> Any:
        """Make TRL's client of a server that is up, and open the channel for weights."""
        try:
            from trl.generation.vllm_client import VLLMClient

            await_server(self._url, settings.vllm_server_timeout)
            with self._asked("say which model it serves"):
                client = VLLMClient(base_url=self._url, group_port=settings.vllm_group_port)
        except ImportError as absent:
            raise ImportError(
                f"rollout_engine: vllm needs packages that are not installed ({absent}); in the checkout: "
                "pip install '.[vllm]'"
            ) from absent
        # The client sets no time limit of its own: a server that is stuck would be waited for without end.
        patient = functools.partial(client.session.request, timeout=settings.vllm_request_timeout)
        client.session.request = patient  # type: ignore[method-assign]
        with self._asked("tell its configuration"):
            mode = client.get_server_info()["model_config"]["logprobs_mode"]
        if mode != _MODE:
            raise ValueError(
                f"rollout_engine: the vLLM server at {self._url} gives {mode}, which know nothing of the temperature; "
                f"start it with --logprobs-mode {_MODE}"
            )
        with self._asked("open the channel for weights"):
            client.init_communicator(device=next(self._model.parameters()).device)
        return client

    def _send(self) -> None:
        """Send all weights, adapters merged into them, and have the server forget what it computed with others."""
        try:
            with merged_adapters(self._model):
                weights = served_weights(self._model)
                told = [(name, str(w.dtype).removeprefix("torch."), list(w.shape)) for name, w in weights.items()]
                with self._asked("take the weights"):
                    self._client.update_named_params(told, iter(weights.items()))
                    self._client.reset_prefix_cache()
        except CannotMerge as problem:
            raise ValueError(f"rollout_engine: a vLLM server takes merged weights, and {problem}") from problem
        self._stale = False

    def _verify(self, limit: float) -> None:
        """See that weights arrive: have the server compute with some that give every token another log-prob."""
        prompt = self._tokenizer(_ASKED)["input_ids"]
        with halved_head(self._model):
            self._send()
            greedy: dict[str, Any] = {"max_tokens": _ANSWERED, "temperature": 0.0}
            ids, given = self._complete("the first prompt", prompt, {"ignore_eos": True}, **greedy)
            theirs = torch.tensor(given)
            if not theirs.isfinite().all():
                raise FloatingPointError(f"rollout_engine: the vLLM server at {self._url} gives log-probs of nan")
            sent = gap_to_policy(self._model, [prompt], [ids], [theirs])
        own = gap_to_policy(self._model, [prompt], [ids], [theirs])
        self._send()
        if sent <= limit:
            return
        if own <= limit:
            raise ValueError(
                f"rollout_engine: weights do not arrive: the vLLM server at {self._url} took some, and its log-probs "
                f"are {sent:.3g} nats from theirs (at most {limit:.3g} by max_sampling_gap); they are still those of "
                "the weights that it was started with. Restart it"
            )
        raise ValueError(
            f"rollout_engine: log-probs of the vLLM server at {self._url} are not those of the weights that it was "
            f"sent: {sent:.3g} nats apart (at most {limit:.3g} by max_sampling_gap). It serves another model, computes "
            "in a coarser type (start it with the policy's --dtype), or its weights do not arrive"
        )

    def _complete(
        self, name: str, prompt: Sequence[int], special: dict[str, Any], **options: Any
    ) -> tuple[list[int], list[float]]:
        """Ask for one completion: its tokens and their log-probs, which come with the tokens they are of."""
        with self._asked(f"complete {name}"):
            answer = self._client.generate([list(prompt)], logprobs=0, generation_kwargs=special, **options)
        (ids,), given = answer["completion_ids"], answer["logprobs"]
        if given is None or [of[0] for of in answer["logprob_token_ids"][0]] != ids:
            raise ConnectionError(
                f"{name}: the server at {self._url} gave no log-prob for each token of its completion"
            )
        return ids, [math.nan if values[0] is None else values[0] for values in given[0]]  # JSON knows no nan

    @contextlib.contextmanager
    def _asked(self, task: str) -> Iterator[None]:
        """Name the server and what it was asked to do where that fails: the client raises plain exceptions."""
        try:
            yield
        except ImportError:
            raise
        except NotImplementedError as problem:  # of a policy that is not on a GPU
            raise NotImplementedError(f"rollout_engine: {problem}") from problem
        except Exception as problem:
            raise ConnectionError(
                f"rollout_engine: the vLLM server at {self._url} did not {task}: {problem}"
            ) from problem


def await_server(url: str, seconds: float) -> None:
    """Wait until a server is up; `ConnectionError` after so many seconds."""
    until = time.monotonic() + seconds
    while True:
        left = until - time.monotonic()
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=max(left, 0.1)):
                return
        except OSError as problem:
            if left <= 0:
                raise ConnectionError(
                    f"vllm_server_base_url: no vLLM server answers at {url} within {seconds:g} seconds ({problem}); "
                    "docs/rollouts.md says how to start one"
                ) from problem
        time.sleep(min(1.0, max(until - time.monotonic(), 0.0)))
