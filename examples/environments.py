"""Let an environment answer what the policy writes: its observation follows a call, then the policy continues.

    cfa-train --environment examples.environments:calculator

For an environment of yours write a function like `calculator` in a module of yours.
"""

import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from cfa_kernels import KeptTokens
from cfa_kernels.text.offsets import decoded

FAILURES = (Exception, SystemExit)  # of an environment's code; not signals


class EnvironmentFailure(ConnectionError):
    """An environment raised, did not return, or returned no text; the message names rollout and turn.

    The training program ends in one line at an error of this kind, which also names the step.
    """


class Calculator:
    """Complete sums such as GSM8K's `<<48/2=` by their results, also without the brackets.

    It is an environment of `PlayedEngine` and of TRL's `environment_factory`, where `step` is the tool.

    Attributes:
        call: pattern whose first match in what the policy has written since the last observation ends its turn.
    """

    call: ClassVar[str] = r"(?:<<)?(?<![\d.])\d{1,12}(?:\.\d{1,6})?(?:[-+*/]\d{1,12}(?:\.\d{1,6})?)+="

    def reset(self, **columns: Any) -> None:
        """Begin a rollout; a calculator has no state."""

    def step(self, text: str) -> str:
        """Return the result of the last sum in a text.

        Args:
            text: what has been written, up to the sign =

        Returns:
            The result, and the closing brackets where the sum opened them.
        """
        *_, call = re.finditer(self.call, text) if re.search(self.call, text) else [None]
        if call is None:
            return "no sum"
        sums, total = call.group(), Fraction(0)
        try:
            for sign, term in re.findall(r"([+-]?)([^+\-=<]+)", sums):
                product = Fraction(1)
                for operator, number in re.findall(r"([*/]?)([\d.]+)", term):
                    product = product / Fraction(number) if operator == "/" else product * Fraction(number)
                total += -product if sign == "-" else product
        except ZeroDivisionError:
            return "undefined"
        return (str(total) if total.denominator == 1 else f"{float(total):g}") + ">>" * sums.startswith("<<")


class PlayedEngine:
    """An engine whose completions continue after the observations of environments, one for each completion.

    What an engine samples after a call is dropped, so that any engine will do. An observation's tokens have log-prob 0
    and a mask of 0; they count towards the length limit.
    """

    def __init__(
        self, make: Callable[[], Any], engine: Any, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int],
        thought_tags: str = "", timeout: float = 10.0,
    ) -> None:  # fmt: skip
        """Play the environments that `make` makes, of which one is tried.

        An environment has `reset()`, `step(text)`, which returns a text, and `call`, the pattern that ends a turn.
        `engine`, `tokenizer`, `ends` and `thought_tags` are what the program gives; a step may take `timeout` seconds.
        """
        self._engine, self._tokenizer, self._make, self._ends = engine, tokenizer, make, ends
        self._thought_tags, self._timeout, self.notes = thought_tags, timeout, engine.notes
        tried = self._ask("trial", "maker", make)
        if missing := [part for part in ("call", "reset", "step") if not hasattr(tried, part)]:
            raise EnvironmentFailure(f"environment has no {missing[0]}; it needs reset, step and a pattern, call")
        self._ask("trial", "call", lambda: re.compile(tried.call))

    def weights_changed(self) -> None:
        """Tell the engine."""
        self._engine.weights_changed()

    def __call__(
        self, prompts: Sequence[Sequence[int]], *, max_completion_length: int,
        keys: Sequence[Sequence[int]] | None = None, names: Sequence[str] | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        """Complete prompts as `Engine` says; further turns draw with the keys and the number of the turn."""
        names = names or [f"rollout {b}" for b in range(len(prompts))]
        ids, masks, most = [list[int]() for _ in prompts], [list[int]() for _ in prompts], None
        logprobs, kept = ([list[Any]() for _ in prompts] for _ in range(2))
        stopped = [False] * len(prompts)
        environments = [self._ask(name, "maker", self._make) for name in names]
        active, turn = list(range(len(prompts))), 0
        for b in active:
            self._ask(names[b], "reset", environments[b].reset)
        while active:
            part = self._engine(
                [[*prompts[b], *ids[b]] for b in active],
                max_completion_length=max(max_completion_length - len(ids[b]) for b in active),
                keys=keys and [[*keys[b], turn] if turn else keys[b] for b in active],
                names=[names[b] for b in active], **options,
            )  # fmt: skip
            going, most = list[int](), part.most_kept
            for i, b in enumerate(active):
                room = max_completion_length - len(ids[b])
                row = part.rows.completions[i].tolist()[:room]
                end, text = self._call_in(names[b], environments[b], row)
                row = row[: end or len(row)]
                ids[b] += row
                masks[b] += [1] * len(row)
                logprobs[b].append(part.logprobs[i][: len(row)].cpu())
                if part.kept_tokens is not None:
                    kept[b].append(part.kept_tokens[i].take(slice(0, len(row))))
                if end is None:
                    stopped[b] = not part.truncated[i] and len(row) == part.rows.lengths[i]
                    continue
                observation = self._observed(f"{names[b]}, turn {turn}", environments[b], text)
                seen = observation[: max_completion_length - len(ids[b])]
                ids[b] += seen
                masks[b] += [0] * len(seen)
                logprobs[b].append(torch.zeros(len(seen)))
                kept[b] += [KeptTokens.of([[]] * len(seen))] if part.kept_tokens is not None else []
                if len(ids[b]) < max_completion_length:
                    going.append(b)
            active, turn = going, turn + 1
        return type(part).of(
            prompts, ids, [torch.cat(row) for row in logprobs], self._ends, self._tokenizer, most,
            self._thought_tags, [KeptTokens.joined(row) for row in kept] if kept[0] else None,
            [torch.tensor(row) for row in masks], stopped=stopped,
        )  # fmt: skip

    def _call_in(self, where: str, environment: Any, row: list[int]) -> tuple[int | None, str]:
        """Count the tokens up to the end of the first call in a row, None without one; and their text."""

        def text(count: int) -> str:
            return decoded(row[:count], self._tokenizer)

        pattern: re.Pattern[str] = self._ask(where, "call", lambda: re.compile(environment.call))
        found = pattern.search(text(len(row)))
        if found is None:
            return None, ""
        end = bisect_left(range(len(row)), found.end(), key=lambda t: len(text(t + 1))) + 1
        return end, text(end)

    def _observed(self, where: str, environment: Any, text: str) -> list[int]:
        observation = self._ask(where, "step", lambda: environment.step(text))
        if not isinstance(observation, str) or not observation:
            raise EnvironmentFailure(
                f"{where}: environment's step must return a text that is not empty, got {observation!r}"
            )
        ids: list[int] = self._tokenizer(observation, add_special_tokens=False)["input_ids"]
        if any(token in self._ends for token in ids):
            raise EnvironmentFailure(
                f"{where}: environment's step returned the end of a completion, {observation!r}; omit it"
            )
        return ids

    def _ask(self, where: str, what: str, call: Callable[[], Any]) -> Any:
        result = list[Any]()

        def run() -> None:
            try:
                result.append((call(), None))
            except FAILURES as problem:
                result.append((None, problem))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self._timeout)
        if not result:
            raise EnvironmentFailure(f"{where}: environment's {what} did not return within {self._timeout:g} seconds")
        value, problem = result[0]
        if problem is not None:
            raise EnvironmentFailure(
                f"{where}: environment's {what} raised {type(problem).__name__}: {problem}"
            ) from problem
        return value


def calculator(engine: Any, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], thought_tags: str) -> PlayedEngine:
    """Let a calculator complete the sums that the policy writes."""
    return PlayedEngine(Calculator, engine, tokenizer, ends, thought_tags)
