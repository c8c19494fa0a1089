"""Separate what a completion says from its thoughts, its calls, and what others wrote into it.

Signs are read where a text has them, spelled or as special tokens (`sign_names`). A thought that a prompt or a tool's
text leaves open is open for what the policy writes next.
"""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from .patterns import Interval, label_length


def _table(names: str, *others: str) -> dict[str, str]:
    """Read a table of closers by openers: names of tags, and other signs in turn with blanks between them."""
    signs = [sign for other in others for sign in other.split()]
    return {f"<{name}>": f"</{name}>" for name in names.split()} | dict(zip(signs[::2], signs[1::2], strict=True))


THOUGHTS = _table(
    "think thinking thought thoughts reasoning analysis reflection scratchpad cot reason rationale chain_of_thought "
    "seed:think mm:think longcat_think",
    "[THINK] [/THINK] ◁think▷ ◁/think▷ <|START_THINKING|> <|END_THINKING|> <|begin_of_thought|> <|end_of_thought|>",
    "<|inner_prefix|> <|inner_suffix|> <|channel> <channel|>",
) | {
    "Here is my thought process:": "Here is my response:",
    "Here are my reasoning steps:": "[BEGIN FINAL RESPONSE]",
}
"""Signs between which models think, closers by openers; `AnswerRules` may add to them. Harmony's are in `_TURN`."""

_CALLS = _table(
    "tool_call tool_calls tool toolcall function_call function_calls search minimax:tool_call seed:tool_call "
    "｜DSML｜function_calls ｜DSML｜tool_calls",
    "<|tool_call_begin|> <|tool_call_end|> <|tool_calls_begin|> <|tool_calls_end|> <|python_begin|> <|python_end|>",
    "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|action_begin|> <|action_end|>",
    "<|begin_of_query|> <|end_of_query|> <|begin_search_query|> <|end_search_query|> <function= </function>",
    "[TOOL_CALLS] [/TOOL_CALLS] <|tool_call> <tool_call|> <|tool_call|> <|/tool_call|> <|python_tag|> <|eom_id|>",
    "<|START_ACTION|> <|END_ACTION|> <|tools_prefix|> <|tools_suffix|>",
)
_RESPONSES = _table(
    "tool_response tool_responses tool_result tool_results function_results information interpreter observation "
    "tool_output tool_outputs execution_result execution_results",
    "<|tool_response_begin|> <|tool_response_end|> <|tool_output_begin|> <|tool_output_end|>",
    "<|tool_outputs_begin|> <|tool_outputs_end|> <|begin_of_documents|> <|end_of_documents|>",
    "<|begin_search_result|> <|end_search_result|> [TOOL_RESULTS] [/TOOL_RESULTS] <|tool_response> <tool_response|>",
    "<|tool_response|> <|/tool_response|> <|START_TOOL_RESULT|> <|END_TOOL_RESULT|>",
)
_TURN_NAMES = (
    "<|im_start|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|start_header_id|> <|end_header_id|> "
    "<|header_start|> <|header_end|> <start_of_turn> <|turn> <|start_of_role|> <|end_of_role|> <|START_OF_TURN_TOKEN|>"
    " <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|> <|user|> <|assistant|> <|system|> <|observation|> <|tool|> "
    "<｜User｜> <｜Assistant｜> [INST] [/INST] <|start|> <|channel|> <|constrain|> <|message|> [|user|] [|assistant|]"
    " [|system|] [|tool|] ]~b] <SPECIAL_10> <SPECIAL_11> ｜DSML｜ <|begin_of_box|> <|end_of_box|>"
)
_TURN_ENDS = (
    "<|im_end|> <|eot_id|> <|eot|> <|end|> <|return|> <end_of_turn> <turn|> [|endofturn|] <|END_OF_TURN_TOKEN|> "
    "<｜end▁of▁sentence｜> <|endoftext|> <|end_of_text|> </s> <eos> [e~["
)

_NAME = r"[\w.-]{1,80}"
_TO = rf" to={_NAME}(?: ?(?:json|code)\b)?"
_CHANNEL = rf"(?:analysis|commentary|final)(?:{_TO}| ?(?:json|code)\b)?"
_AUTHOR = rf"(?:assistant|{_NAME}(?= to=|<\||\Z))?(?: to={_NAME})?"
_ROLE = r"(?i:user|assistant|system|observation|tool)"
# Headers of turns, the last two forms as harmony's are once special tokens were dropped: "...= 18.assistantfinal18".
# What follows the end of a turn, up to the next header, is nobody's.
_TURN = re.compile(
    rf"(?P<end>{'|'.join(map(re.escape, _TURN_ENDS.split()))})|"
    r"<\|im_start\|>\w{0,30}[^\n<]{0,60}\n?"
    r"|<\|im_(?:user|assistant|system)\|>[^\n<]{0,60}(?:<\|im_middle\|>)?"
    r"|<\|(?:start_header_id|header_start)\|>[^\n<]{0,60}(?:<\|(?:end_header_id|header_end)\|>\s{0,4})?"
    r"|<(?:start_of_turn|\|turn)>\w{0,30}\n?"
    r"|<\|start_of_role\|>[^<]{0,200}(?:<\|end_of_role\|>)?"
    r"|<\|START_OF_TURN_TOKEN\|>(?:<\|[A-Z]{1,20}_TOKEN\|>)?"
    rf"|(?:<[|｜]{_ROLE}[|｜]>|\[\|{_ROLE}\|\]|(?:\]~b\]|<SPECIAL_\d\d>)(?:(?:{_ROLE}|ai)\b)?)\n?"
    r"|\[/?INST\]"
    rf"|(?:<\|start\|>{_AUTHOR})?<\|channel\|>(?P<channel>\w{{0,20}}(?: to={_NAME})?)"
    r"(?:[^<\n]{0,40}(?=<\|(?:constrain|message)\|>))?(?:<\|constrain\|>\w{0,20})?(?:<\|message\|>)?"
    rf"|<\|start\|>{_AUTHOR}(?:<\|message\|>)?"
    rf"|assistant(?P<dropped>{_CHANNEL})"
)
_FIRST_CHANNEL = re.compile(
    r"\s{0,20}(?P<dropped>analysis(?=[^\s:.,;!?'’-])|(?:commentary|final)(?=[A-Z\d*$\\#(])"
    rf"|(?:analysis|commentary){_TO})"
)
# Harmony's tools are authors by their names.
_OTHER = re.compile(
    r"(?i)(?<![a-z])(?:user|human|system|developer|tool|functions?|ipython|observation|environment)(?![a-z])"
    r"| to=|\[INST\]|<\|start\|>(?!assistant\b)\w"
)
_ROLES = ("user", "assistant", "system", "tool", "ipython", "model")
_LABEL = re.compile(
    rf"^(?:{'|'.join(_ROLES)})[ \t]*$|<[|｜](?!(?:begin|end)_of_box)[\w▁/]{{1,40}}[|｜]>|\[\|[a-z]{{4,20}}\|\]"
    r"|</?seed:\w{1,30}>",
    re.MULTILINE,
)
# What a model that runs on writes above a question of its own, at the start of a line: "Question:", "**Q2:**",
# "Problem 3.", "### Question", "Human:", and the line "user" that a header of a turn leaves without its special tokens.
_NEXT_QUESTION = re.compile(
    r"^[^\S\n]{0,8}(?:(?:[>|-]|\d{1,2}[.)])\s)?(?P<heading>#{1,6}[^\S\n]{0,4})?(?:[*_\[<(]{1,4}|\\[a-z]{1,12}\*?\{)?"
    r"(?:(?:(?i:(?:(?:here(?:'s|\sis)|next|new|another|second|third|follow-?up|practice|test|math|word|similar)\s){0,3}"
    r"(?:question|problem|prompt)(?:\s(?:statement|description))?|(?:exercise|example)(?=\s\W?\d))|Q|[问問][题題]?|[题題]目)"
    r"(?i:\s?(?:no\.?\s?|\W)?\d{1,3}\b|\s(?:one|two|three|four|five)\b)?"
    r"|(?i:human|user|instruct(?:ion)?|(?(heading)input|(?!))))"
    r"(?:[*_\])}]{0,4}(?:[^\S\n]?[:：]|>|[^\S\n]*$)|(?<=Q)\.(?=\s)|(?<=\d)[*_]{0,3}[.)][*_]{0,3}(?=\s))",
    re.MULTILINE,
)
_OF_USER = re.compile(r"(?i)(?<![a-z])(?:user|human)(?![a-z])|\[/?INST\]")
# Tags around what is said, of which the reader of answers needs the first.
_REPLY = re.compile(r"(?i)(?<![\"'`])</?(?:answer|response|solution)>")


class _Signs(NamedTuple):
    kinds: list[str]  # of each pair of signs
    pairs: dict[str, tuple[bool, int]]  # by sign in small letters: whether it opens, and which pair it is of
    pattern: re.Pattern[str]
    hint: re.Pattern[str]  # what a text without turns and signs does not hold, quick to search
    names: frozenset[str]

    def of(self, sign: re.Match[str]) -> tuple[bool, int]:
        """Tell whether a sign opens, and which pair it is of."""
        return self.pairs[sign["sign"].lower()]


def _spellings(sign: str) -> set[str]:
    """Give a sign as models spell it, with either word for a beginning and with DeepSeek's bars and lines."""
    words = {sign, sign.replace("_begin|", "_start|")}
    return words | {word.replace("|", "｜").replace("_", "▁") for word in words if sign.startswith("<|")}


@lru_cache(maxsize=64)
def _signs(thought_tags: str) -> _Signs:
    kinds, pairs, names = list[str](), dict[str, tuple[bool, int]](), {*_TURN_NAMES.split(), *_TURN_ENDS.split()}
    for kind, table in (("thought", THOUGHTS | _table("", thought_tags)), ("call", _CALLS), ("response", _RESPONSES)):
        for pair in table.items():
            for i, name in enumerate(map(_spellings, pair)):
                names |= name
                pairs = {one.lower(): (i == 0, len(kinds)) for one in name} | pairs
            kinds.append(kind)
    begins = {sign[: 8 if sign[0].isalpha() else 2] for sign in names}
    begins = {case(one) for one in begins for case in (str, str.lower, str.upper, str.capitalize)}
    begins |= {f"\n{role}" for role in _ROLES}
    hint = re.compile("|".join(map(re.escape, sorted(begins))) + f"|assistant{_CHANNEL}")
    either = "|".join(map(re.escape, sorted(pairs, key=len, reverse=True)))
    pattern = re.compile(rf"(?P<sign>{either})(?:(?<=<\|channel>)\w{{1,20}}\n)?", re.IGNORECASE | re.ASCII)
    return _Signs(kinds, pairs, pattern, hint, frozenset(names))


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
    """Read a completion's text up to where a model that runs on asks itself a question.

    A header of a question or of the user's turn ends the text if a number stands before it, else it may restate the
    question: "Sure! Question: ..." and a header that begins the text end nothing. Thoughts, and what others wrote, hold
    no such header, and a turn that begins with a tool's result is none of the user's.

    Args:
        text: as `token_offsets` gives it with `sign_names` shown.
        prompt: the text before it, likewise, which may leave a thought open.
        foreign: disjoint characters that the policy did not write, in order.
        thought_tags: as in `AnswerRules`.
    """
    signs, state = _signs(thought_tags), _after_prompt(prompt, thought_tags)
    has_signs = signs.hint.search(text) or _FIRST_CHANNEL.match(text) or text.startswith(_ROLES)
    if not (foreign or state.thought is not None or has_signs or _NEXT_QUESTION.search(text)):
        return Speech(text, text, text, text, [])
    regions = _regions(text, state, foreign, signs)
    others = [*foreign, *regions["response"], *regions["turn"]]
    signs_and_calls = merged([*others, *regions["call"], *regions["sign"]])
    content = blanked(text, [*others, *regions["thought"]])
    no_reasoning = merged([*signs_and_calls, *regions["reply"]])
    return Speech(text, content, blanked(content, signs_and_calls), blanked(text, no_reasoning), no_reasoning)


def unfinished_number(text: str) -> list[Interval]:
    """Find the number at the very end of a text that was cut off, which may not be whole: 10 of "10,222.22"."""
    start = len(text.rstrip("0123456789.,:/^{\\'’"))
    return [(start, len(text))] if re.search(r"\d", text[start:]) else []


class _State(NamedTuple):
    thought: int | None = None  # the pair of signs of the thought that is open; -1 for that of a channel
    has_thought: bool = False  # whether there was one in the turn; else a closer ends one that began before the text


def _owner(turn: re.Match[str]) -> str:
    """Tell what the text below a turn's header is: "content", a "thought", or another's or a tool's "response"."""
    named = turn.groupdict()
    channel = named.get("channel") or named["dropped"]
    if named.get("end") or _OTHER.search(turn.string, *turn.span()):
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
        is_open = opens and signs.kinds[pair] == "thought" and sign.end() >= end  # whatever the text speaks of
        if not is_open and (tool is not None or signs.kinds[pair] != "thought"):
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
    regions["reply"] = [tag.span() for tag in _REPLY.finditer(written)]
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
    regions["response"].append((_end_of_reply(written, turns, regions, signs), len(text)))
    return regions


def _end_of_reply(text: str, turns: Sequence[re.Match[str]], regions: dict[str, list[Interval]], signs: _Signs) -> int:
    """Find where the next question begins, by its header or by that of the user's turn; the text's length without."""
    said = blanked(text, [part for kind in ("thought", "call", "response", "turn") for part in regions[kind]])
    starts = [match.start() for match in _NEXT_QUESTION.finditer(said)]
    for turn in turns:
        sign = signs.pattern.search(text, turn.end(), turn.end() + 80)
        is_tools = sign and signs.kinds[signs.of(sign)[1]] == "response" and not text[turn.end() : sign.start()].strip()
        if _OF_USER.search(text, *turn.span()) and not is_tools:
            starts.append(turn.start())
    lines = (line for line in re.finditer(r"[^\n]+", said) if re.search(r"\d", line[0][label_length(line[0]) :]))
    number = next((line.start() for line in lines), len(text)) if starts else 0
    return min((start for start in starts if start > number), default=len(text))


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
