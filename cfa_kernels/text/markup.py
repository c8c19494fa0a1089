"""Separate what a completion says from its thoughts, its calls, and what others wrote into it.

Signs are read where a text has them, spelled or as special tokens (`sign_names`). A thought that a prompt or a tool's
text leaves open is open for what the policy writes next.
"""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from .patterns import Interval


def _xml(*names: str) -> dict[str, str]:
    return {f"<{name}>": f"</{name}>" for name in names}


THOUGHTS = {
    **_xml("think", "thinking", "thought", "thoughts", "reasoning", "analysis", "reflection", "scratchpad", "cot"),
    **_xml("reason", "rationale", "chain_of_thought", "seed:think", "mm:think", "longcat_think"),
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<|inner_prefix|>": "<|inner_suffix|>",
    "<|channel>": "<channel|>",
    "Here is my thought process:": "Here is my response:",
    "Here are my reasoning steps:": "[BEGIN FINAL RESPONSE]",
}
"""Signs between which models think, closers by openers; `AnswerRules` may add to them. Harmony's are in `_TURN`."""

_CALLS = {
    **_xml("tool_call", "tool_calls", "tool", "function_call", "function_calls", "minimax:tool_call", "search"),
    "<function=": "</function>",
    "[TOOL_CALLS]": "[/TOOL_CALLS]",
    "<|tool_call>": "<tool_call|>",
    "<|tool_call|>": "<|/tool_call|>",
    "<|START_ACTION|>": "<|END_ACTION|>",
    "<|tool_calls_section_begin|>": "<|tool_calls_section_end|>",
    "<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>",
    "<|python_tag|>": "<|eom_id|>",
}
_RESPONSES = {
    **_xml("tool_response", "tool_responses", "tool_result", "tool_results", "function_results", "information"),
    **_xml("interpreter", "observation", "tool_output", "tool_outputs", "execution_result", "execution_results"),
    "[TOOL_RESULTS]": "[/TOOL_RESULTS]",
    "<|tool_response>": "<tool_response|>",
    "<|tool_response|>": "<|/tool_response|>",
    "<|START_TOOL_RESULT|>": "<|END_TOOL_RESULT|>",
    "<｜tool▁outputs▁begin｜>": "<｜tool▁outputs▁end｜>",
}
_TURN_NAMES = (
    "<|im_start|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|header_start|>", "<|header_end|>", "<start_of_turn>", "<|turn>", "<|start_of_role|>",
    "<|end_of_role|>", "<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|user|>",
    "<|assistant|>", "<|system|>", "<|observation|>", "<|tool|>", "<｜User｜>", "<｜Assistant｜>", "[INST]", "[/INST]",
    "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>",
)  # fmt: skip

_CHANNEL = r"(?:analysis|commentary|final)(?: to=[\w.]{1,80})?(?: ?(?:json|code)\b)?"
_AUTHOR = r"(?:assistant|user|system|developer|tool|functions\.[\w.]{1,60})?(?: to=[\w.]{1,80})?"
# Headers of turns, the last two forms as harmony's are once special tokens were dropped: "...= 18.assistantfinal18".
_TURN = re.compile(
    r"<\|im_start\|>\w{0,30}[^\n<]{0,60}\n?"
    r"|<\|im_(?:user|assistant|system)\|>[^\n<]{0,60}(?:<\|im_middle\|>)?"
    r"|<\|(?:start_header_id|header_start)\|>[^\n<]{0,60}(?:<\|(?:end_header_id|header_end)\|>\s{0,4})?"
    r"|<(?:start_of_turn|\|turn)>\w{0,30}\n?"
    r"|<\|start_of_role\|>[^<]{0,200}(?:<\|end_of_role\|>)?"
    r"|<\|START_OF_TURN_TOKEN\|>(?:<\|[A-Z]{1,20}_TOKEN\|>)?"
    r"|<[|｜](?i:user|assistant|system|observation|tool)[|｜]>\n?"
    r"|\[/?INST\]"
    rf"|(?:<\|start\|>{_AUTHOR})?<\|channel\|>(?P<channel>\w{{0,20}}(?: to=[\w.]{{1,80}})?)"
    r"(?:[^<\n]{0,40}(?=<\|(?:constrain|message)\|>))?(?:<\|constrain\|>\w{0,20})?(?:<\|message\|>)?"
    rf"|<\|start\|>{_AUTHOR}(?:<\|message\|>)?"
    rf"|(?:functions\.[\w.]{{1,80}} to=)?assistant(?P<dropped>{_CHANNEL})"
)
_FIRST_CHANNEL = re.compile(
    r"\s{0,20}(?P<dropped>analysis(?=[^\s:.,;!?'’-])|(?:commentary|final)(?=[A-Z\d*$\\#(])"
    r"|commentary to=[\w.]{1,80}(?: ?json\b)?)"
)
_OTHER = re.compile(
    r"(?i)(?<![a-z])(?:user|human|system|developer|tool|functions?|ipython|observation|environment)(?![a-z])"
)
_ROLES = ("user", "assistant", "system", "tool", "ipython", "model")
_LABEL = re.compile(
    rf"^(?:{'|'.join(_ROLES)})[ \t]*$|<[|｜][\w▁/]{{1,40}}[|｜]>|<(?:end_of_turn|turn\|)>",
    re.MULTILINE,
)


class _Signs(NamedTuple):
    kinds: list[str]  # of each pair of signs
    pattern: re.Pattern[str]  # group `o3` is the opener of pair 3, `c3` its closer
    hint: re.Pattern[str]  # what a text without turns and signs does not hold, quick to search
    names: frozenset[str]

    def of(self, sign: re.Match[str]) -> tuple[bool, int]:
        """Tell whether a sign opens, and which pair it is of."""
        group: str = sign.lastgroup  # type: ignore[assignment]
        return group[0] == "o", int(group[1:])


@lru_cache(maxsize=64)
def _signs(thought_tags: str) -> _Signs:
    words = thought_tags.split()
    thoughts = THOUGHTS | dict(zip(words[::2], words[1::2], strict=True))
    pairs = [
        (kind, *pair)
        for kind, table in (("thought", thoughts), ("call", _CALLS), ("response", _RESPONSES))
        for pair in table.items()
    ]
    label = {"<|channel>": r"(?:\w{1,20}\n)?"}  # "thought"
    either = "|".join(
        f"(?P<o{i}>{re.escape(opener)}{label.get(opener, '')})|(?P<c{i}>{re.escape(closer)})"
        for i, (_, opener, closer) in enumerate(pairs)
    )
    names = {sign for _, *pair in pairs for sign in pair}
    begins = {sign[: 8 if sign[0].isalpha() else 2] for sign in names.union(_TURN_NAMES)}
    begins = {case(one) for one in begins for case in (str, str.lower, str.upper, str.capitalize)}
    begins |= {"<end_of_turn>", *(f"\n{role}" for role in _ROLES)}
    hint = re.compile("|".join(map(re.escape, sorted(begins))) + f"|assistant{_CHANNEL}")
    firsts = "".join(re.escape(first) for first in sorted({sign[0] for sign in names}))
    pattern = re.compile(f"(?=[{firsts}])(?:{either})", re.IGNORECASE)
    return _Signs([kind for kind, _, _ in pairs], pattern, hint, frozenset(names).union(_TURN_NAMES))


def sign_names(thought_tags: str = "") -> frozenset[str]:
    """Name the special tokens that `read_speech` must see in a text; `thought_tags` as in `AnswerRules`."""
    return _signs(thought_tags).names


class Speech(NamedTuple):
    """Readings of a completion's text, all as long as it is, with line breaks in place of what a reading omits."""

    text: str
    content: str  # without thoughts and what others wrote
    statement: str  # and without tool calls and signs
    reasoning: str  # with thoughts, but without tool calls, signs and what others wrote
    no_reasoning: list[Interval]  # what `reasoning` omits


def read_speech(text: str, *, prompt: str = "", foreign: Sequence[Interval] = (), thought_tags: str = "") -> Speech:
    """Read a completion's text.

    Args:
        text: as `token_offsets` gives it with `sign_names` shown.
        prompt: the text before it, likewise, which may leave a thought open.
        foreign: disjoint characters that the policy did not write, in order.
        thought_tags: as in `AnswerRules`.
    """
    signs, state = _signs(thought_tags), _after_prompt(prompt, thought_tags)
    has_signs = signs.hint.search(text) or _FIRST_CHANNEL.match(text) or text.startswith(_ROLES)
    if not (foreign or state.thought is not None or has_signs):
        return Speech(text, text, text, text, [])
    regions = _regions(text, state, foreign, signs)
    others = [*foreign, *regions["response"], *regions["turn"]]
    no_reasoning = merged([*others, *regions["call"], *regions["sign"]])
    content = blanked(text, [*others, *regions["thought"]])
    return Speech(text, content, blanked(content, no_reasoning), blanked(text, no_reasoning), no_reasoning)


class _State(NamedTuple):
    thought: int | None = None  # the pair of signs of the thought that is open; -1 for that of a channel
    has_thought: bool = False  # whether there was one in the turn; else a closer ends one that began before the text


def _owner(turn: re.Match[str]) -> str:
    """Tell what the text below a turn's header is: "content", a "thought", or another's or a tool's "response"."""
    channel = turn.groupdict().get("channel") or turn["dropped"]
    author, _, recipient = turn.group().partition(" to=")
    if _OTHER.search(author) or turn.group() == "[INST]" or (recipient and not recipient.startswith("assistant")):
        return "response"
    return "content" if not channel or channel.startswith("final") else "thought"


def _after_others(state: _State, text: str, signs: _Signs) -> _State:
    """Give the state in which others' text, a prompt's or a tool's, leaves the policy.

    An opener counts at the end of the text, or at the start of its last turn if nothing closes the thought: a question
    and an instruction may speak of tags.
    """
    turns = [*_TURN.finditer(text)]
    if turns:
        state = _State(-1, True) if _owner(turns[-1]) == "thought" else _State()
    after, end = turns[-1].end() if turns else 0, len(text.rstrip())
    start = after + len(text[after:]) - len(text[after:].lstrip())
    tool = None
    for sign in signs.pattern.finditer(text, after):
        opens, pair = signs.of(sign)
        if tool is not None or signs.kinds[pair] != "thought":
            tool = tool if tool not in (None, pair) else pair if opens else None
        elif not opens or sign.end() >= end or (turns and sign.start() == start):
            has_thought = opens or bool(turns) or sign.end() >= end or state.has_thought
            state = _State(pair if opens else None, has_thought)
    return state


@lru_cache(maxsize=256)
def _after_prompt(prompt: str, thought_tags: str) -> _State:
    return _after_others(_State(), prompt, _signs(thought_tags))


def _regions(text: str, state: _State, foreign: Sequence[Interval], signs: _Signs) -> dict[str, list[Interval]]:
    """Find the regions of a text by kind."""
    written = blanked(text, foreign)
    turns = [*_TURN.finditer(written), *filter(None, [_FIRST_CHANNEL.match(written)])]
    cuts: list[tuple[int, int, re.Match[str] | None]] = [(*turn.span(), turn) for turn in turns]
    cuts += [(start, end, None) for start, end in foreign]
    regions: dict[str, list[Interval]] = {kind: [] for kind in ("thought", "call", "response")}
    regions["turn"] = [turn.span() for turn in turns]
    regions["sign"] = [label.span() for label in _LABEL.finditer(written)]
    owner, at = "content", 0
    for start, end, turn in [*sorted(cuts, key=lambda cut: cut[:2]), (len(text), len(text), None)]:
        if owner == "response":
            regions[owner].append((at, start))
        else:
            state = _read_piece(written, at, start, state, signs, regions)
        owner, at = "content" if turn is None else _owner(turn), max(at, end)
        if turn is None:
            state = _after_others(state, text[start:end], signs)
        else:
            state = _State(-1, True) if owner == "thought" else _State()
    return regions


def _read_piece(
    text: str, start: int, end: int, state: _State, signs: _Signs, regions: dict[str, list[Interval]]
) -> _State:
    """Add the regions between two cuts, and give the state in which the second one finds the text."""
    thought, has_thought = state
    thought_start, tool, tool_start = start, None, start
    for sign in signs.pattern.finditer(text, start, end):
        opens, pair = signs.of(sign)
        kind = signs.kinds[pair]
        regions["sign"].append(sign.span())
        if tool is not None:
            closes_thought = kind == "thought" and not opens and pair == thought
            is_answered = kind == "response" and opens and signs.kinds[tool] == "call"
            if not (closes_thought or is_answered or (pair == tool and not opens)):
                continue
            regions[signs.kinds[tool]].append((tool_start, sign.start()))
            tool = None
        if kind != "thought":
            tool, tool_start = (pair, sign.end()) if opens else (None, start)
        elif opens and thought is None:
            thought, thought_start, has_thought = pair, sign.end(), True
        elif not opens and (pair == thought or not has_thought):
            regions["thought"].append((start if thought is None else thought_start, sign.start()))
            thought, has_thought = None, True
    if tool is not None:
        regions[signs.kinds[tool]].append((tool_start, end))
    if thought is not None:
        regions["thought"].append((thought_start, end))
    return _State(thought, has_thought)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Put intervals in order and join those that touch."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        elif start < end:
            joined.append((start, end))
    return joined


def blanked(text: str, intervals: Iterable[Interval]) -> str:
    """Put a line break in the place of each character of the intervals."""
    parts, at = [], 0
    for start, end in merged(intervals):
        parts += [text[at:start], "\n" * (end - start)]
        at = end
    return "".join([*parts, text[at:]])
