"""Complete prompts with a vLLM server that shows that it has the policy's weights, through TRL's client (trl 1.16)."""

import contextlib
import functools
import math
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, PreTrainedTokenizerBase

from cfa_kernels.integrations.vllm_kept import MOST_KEPT, ids_listed, read_lists
from cfa_kernels.loss.off_policy import open_choice, sampling_gaps
from cfa_kernels.model.merged import merged_adapters
from cfa_kernels.model.parts import causal_lm
from cfa_kernels.rows import Rows
from cfa_kernels.scoring.packed import packed_logprobs

from .. import processes
from ..extras import installing
from ..precision import rounding
from .engine import Rollouts, end_ids, lengths_before, notes_on_ends, require_finite_logits

_AT_ONCE = 64  # requests
START_SECONDS = 240.0
REQUEST_SECONDS = 600.0  # the client sets no limit: a server that is stuck would be waited for without end
_MODE, _ADAPTER, _RESETS = "processed_logprobs", "cfa-policy", 5
_SHAPE = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")


class VllmEngine:
    """A vLLM server as an engine: weights are sent before sampling if they have changed."""

    def __init__(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, url: str, limit: float = math.inf,
        thought_tags: str = "", stop: Sequence[str] = (), weights: str = "auto",
    ) -> None:  # fmt: skip
        """Reach the server at `url`, choose how it gets weights, and see that it computes with those it is sent.

        All processes of a run call this. `limit` is the largest gap between the log-probs of server and `model`, nats;
        `thought_tags` as in `AnswerRules`, `stop` as in `lengths_before`, `weights` as in `TrainSettings.vllm_weights`.
        """
        self._model, self._tokenizer, self._url = model, tokenizer, url.rstrip("/")
        self._thought_tags, self._stop = thought_tags, list(stop)
        self._ends, self._failure = end_ids(model, tokenizer), list[ConnectionError]()
        try:
            from trl.generation.vllm_client import VLLMClient
            from urllib3.util.retry import Retry

            with self._named("say which model it serves"):
                self._client = VLLMClient(base_url=self._url)
        except ImportError as absent:
            raise ImportError(f"rollout_engine: vllm: {absent}: {installing('vllm')}") from absent
        session: Any = self._client.session
        for connections in session.adapters.values():
            connections.max_retries = Retry(0, read=False)  # TRL's client repeats requests, also half-done ones
        session.headers["Connection"] = "close"  # else a request may meet a connection that the server is closing
        session.request = functools.partial(session.request, timeout=REQUEST_SECONDS)
        self._transport, most = processes.on_first(lambda: self._prepare(limit, weights))
        self._most_kept = k = ids_listed(most)
        self._client.model = _ADAPTER if self._transport == "adapter" else self._client.model
        self._folder = tempfile.TemporaryDirectory(prefix="cfa-weights-")
        processes.on_first(lambda: self._verify(limit))
        self._stale = False
        cut = f"top_p: nuclei are cut to {k} ids; --max-logprobs {MOST_KEPT} lets the server list more"
        self.notes = [
            "rollout_engine: a run with vLLM may not repeat to the token (docs/rollouts.md)",
            f"vllm_weights: the server takes weights by {self._transport}",
            *notes_on_ends(model, tokenizer), *[cut] * (k < MOST_KEPT),
        ]  # fmt: skip

    def __call__(
        self, prompts: Sequence[Sequence[int]], *, max_completion_length: int,
        keys: Sequence[Sequence[int]] | None = None, temperature: float = 1.0, top_p: float = 1.0,
        names: Sequence[str] | None = None,
    ) -> Rollouts:  # fmt: skip
        """Complete prompts as `Engine` says, with as many requests; a key gives the seed of its request."""
        names = names or [f"sample {b}" for b in range(len(prompts))]
        options: dict[str, Any] = {"max_tokens": max_completion_length, "temperature": 0.0, "logprobs": 0}
        seeds: list[dict[str, Any]] = [{} for _ in prompts]
        if keys is not None:
            options |= {"temperature": temperature, "top_p": top_p}
            seeds = [{"seed": int(np.random.default_rng(list(key)).integers(2**53))} for key in keys]
        if keys is not None and top_p < 1:  # without top_k the list of kept ids might not be complete
            options |= {"top_k": self._most_kept, "logprobs": self._most_kept}
        if self._stale:
            processes.on_first(self._send)
            self._stale = False
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            complete = functools.partial(self._complete, **options)
            completions, logprobs, kept = zip(*pool.map(complete, names, prompts, seeds), strict=True)
        most = options.get("top_k")
        rollouts = Rollouts.of(
            prompts, completions, logprobs, self._ends, self._tokenizer, most, self._thought_tags,
            kept if most else None, stop=self._stop,
        )  # fmt: skip
        require_finite_logits(rollouts.logprobs, names)
        return rollouts

    def weights_changed(self) -> None:
        """Send the weights again before the next completion."""
        self._stale = True

    def _prepare(self, limit: float, weights: str) -> tuple[str, int]:
        """Check the server's configuration; return the transport, and how many log-probs it lists (-1 for all)."""
        with self._named("tell its configuration"):
            served = (info := self._client.get_server_info())["model_config"]
        theirs = own = causal_lm(self._model).config.get_text_config()
        with contextlib.suppress(OSError, ValueError):  # a model that is not on this machine
            theirs = AutoConfig.from_pretrained(served["model"], local_files_only=True).get_text_config()
        other = [name for name in _SHAPE if getattr(theirs, name, None) != getattr(own, name, None)]
        mode, dtype = served["logprobs_mode"], str(served["dtype"]).removeprefix("torch.")
        rounds, self._served = rounding(getattr(torch, dtype)), f"{served['model']} in {dtype}"
        for said, holds in {
            f"gives {mode}, which are not at the temperature; start it with --logprobs-mode {_MODE}": mode != _MODE,
            "returns sampling masks; start it without --return-sampling-mask": served.get("return_sampling_mask"),
            f"serves another model, {served['model']}: its {' and '.join(other)} are not the policy's": bool(other),
            f"serves {self._served}, whose rounding moves log-probs by up to {rounds:g} nats; start it with --dtype "
            f"float32, or raise max_sampling_gap, which is {limit:.3g}": rounds > max(limit, rounding(torch.float32)),
        }.items():
            if holds:
                raise ValueError(f"rollout_engine: the vLLM server at {self._url} {said}")
        device, adapters = next(self._model.parameters()).device, [*getattr(self._model, "peft_config", {}).values()]
        is_plain = len(adapters) == 1 and adapters[0].peft_type == "LORA" and not adapters[0].use_dora
        rank = adapters[0].r if is_plain and not adapters[0].modules_to_save else math.inf
        has_channel = device.type == "cuda" and info["weight_transfer_config"]
        takes_adapter = info["lora_config"] and info["lora_config"]["max_lora_rank"] >= rank
        auto = "adapter" if takes_adapter else "nccl" if has_channel else "file"
        transport = auto if weights == "auto" else weights
        if transport == "nccl":
            with self._named("open a channel for vllm_weights=nccl (vllm_weights=file needs no GPU and no channel)"):
                self._client.init_communicator(device=device)
        return transport, served["max_logprobs"]

    def _send(self) -> None:
        with self._named(f"take weights by vllm_weights={self._transport} (it serves {self._served})"):
            if self._transport == "adapter":
                model, state = cast(Any, self._model), {name: p.data for name, p in self._model.named_parameters()}
                model.save_pretrained(self._folder.name, state_dict=state, save_embedding_layers=False)
                self._post("/v1/load_lora_adapter", lora_name=_ADAPTER, lora_path=self._folder.name, load_inplace=True)
            else:
                with merged_adapters(self._model):
                    self._send_merged(Path(self._folder.name))
            for _ in range(_RESETS):  # the cache holds what other weights computed; vLLM 0.25 and before tell nothing
                answer = self._post("/reset_prefix_cache")
                if not answer.content or answer.json().get("success", True):
                    return
                time.sleep(1.0)
            raise ConnectionError("it keeps its prefix cache while it answers requests of others")

    def _send_merged(self, place: Path) -> None:
        prefix, saved = getattr(self._model, "prefix", None), "modules_to_save.default."  # PEFT's
        weights = {  # by the names of the plain model, tied ones once
            name.replace(".base_layer.", ".").replace(saved, ""): parameter.data
            for name, parameter in causal_lm(self._model).named_parameters()
            if "original_module." not in name and (prefix is None or prefix not in name)
        }
        if self._transport == "nccl":
            types = [(name, str(w.dtype).removeprefix("torch."), list(w.shape)) for name, w in weights.items()]
            self._client.update_named_params(types, iter(weights.items()))
            return
        save_file({name: weight.cpu().contiguous() for name, weight in weights.items()}, place / "part")
        (place / "part").replace(place / "model.safetensors")  # the server may still map the file before
        self._post("/collective_rpc", method="reload_weights", kwargs={"weights_path": str(place)})

    def _post(self, path: str, **body: Any) -> Any:
        if (answer := self._client.session.post(f"{self._url}{path}", json=body)).status_code != 200:
            raise ConnectionError(f"{path} gave {answer.status_code}, {answer.text}; see docs/rollouts.md")
        return answer

    @torch.no_grad()
    def _verify(self, limit: float) -> None:
        # Weights arrive if the server computes with some that give every token another log-prob.
        prompt = self._tokenizer("What is 3 + 4? Add 3 and 4.")["input_ids"]
        changed = [causal_lm(self._model).get_output_embeddings().weight.data]
        if by_adapter := self._transport == "adapter":
            changed = [parameter.data for name, parameter in self._model.named_parameters() if "lora_B" in name]
        values, generator = [weight.clone() for weight in changed], torch.Generator().manual_seed(0)

        def gap(temperature: float = 1.0) -> float:
            ours: Any = packed_logprobs(self._model, row, temperature=temperature)[0]
            return float(sampling_gaps(sampled, ours.cpu()).sum() / open_choice(sampled).sum())

        try:
            for weight in changed:
                noise = torch.randn(weight.shape, generator=generator).to(weight) / 50
                weight.copy_(weight + noise if by_adapter else weight / 2)
            self._send()
            own = {"ignore_eos": True, "stop_token_ids": [], "stop": None}
            ids, sampled, _ = self._complete(
                "the first prompt", prompt, own, max_tokens=16, temperature=0.0, logprobs=0
            )
            row = Rows([torch.tensor(prompt)], [torch.tensor(ids)])
            new, by_old_head = gap(), gap(temperature=0.5)
        finally:
            for weight, value in zip(changed, values, strict=True):
                weight.copy_(value)
        self._send()
        if new < (old := gap()) and new <= limit:
            return
        why = f"Restart it by the policy's model and type; it serves {self._served}"
        if old <= limit:
            why = "It does not take new weights: it computes with those that it had before"
        elif by_old_head <= limit and not by_adapter:
            why = "It keeps its old output layer, as vLLM 0.32 does on a CPU if that is tied to the embedding: train a "
            why += "copy of the model with tie_word_embeddings=False, or an adapter by vllm_weights=adapter"
        said = f"log-probs of the vLLM server at {self._url} are not those of the weights that it was sent"
        raise ValueError(f"rollout_engine: {said}: {new:.3g} nats apart (at most {limit:.3g}). {why}")

    def _complete(self, name: str, prompt: Sequence[int], own: dict[str, Any], **options: Any) -> tuple[Any, ...]:
        special = {"stop_token_ids": self._ends, "stop": self._stop or None} | own
        with self._named(f"complete {name}"):
            answer: Any = self._client.generate([list(prompt)], generation_kwargs=special, **options)
        (ids,) = answer["completion_ids"]
        try:
            logprobs, kept = read_lists(ids, answer["logprob_token_ids"][0], answer["logprobs"][0])
        except (TypeError, LookupError, ValueError) as problem:
            raise ConnectionError(f"{name}: the server at {self._url} gave no log-prob for each token") from problem
        ended = {*ids[-1:]} & {*self._ends} or lengths_before([ids], self._tokenizer, self._stop)[0]
        if len(ids) < (most := options["max_tokens"]) and not ended:
            said = f"the server ended it after {len(ids)} of {most} tokens, by {ids[-1:]}"
            raise ConnectionError(f"{name}: {said}; completions of the policy end by one of {self._ends}")
        return ids, torch.tensor(logprobs, dtype=torch.float32), kept

    @contextlib.contextmanager
    def _named(self, task: str) -> Iterator[None]:
        if self._failure:  # requests that wait for their turn would each wait for a stuck server
            raise self._failure[0]
        try:  # the client raises plain exceptions
            yield
        except ImportError:
            raise
        except Exception as problem:
            said = f"rollout_engine: the vLLM server at {self._url} did not {task}: {problem}"
            self._failure.append(ConnectionError(said))
            raise self._failure[0] from problem


def await_server(url: str) -> None:
    """Wait until a server is up; `ConnectionError` after `START_SECONDS`."""
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=max(until - time.monotonic(), 0.1)):
                return
        except OSError as problem:
            if time.monotonic() >= until:
                said = f"no vLLM server answers at {url} within {START_SECONDS:g} seconds ({problem})"
                raise ConnectionError(
                    f"vllm_server_base_url: {said}; docs/rollouts.md says how to start one"
                ) from problem
        time.sleep(min(1.0, START_SECONDS))
