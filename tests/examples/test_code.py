"""The reward for code: what passes, and what hostile programs get and cannot do."""

import socket
import sys
import time

import pytest

from examples.code import CodeReward, fenced_code
from trainer.rewards.calls import load_reward

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="programs are isolated by means of Linux"),
]
DEADLINE = 120.0  # only a hang reaches it
RIGHT = "def f(x): return 2 * x"
TESTS = ["assert math.isclose(f(1), 2)", "assert f(4) == 8"]


def reward_of(isolation: str, timeout: float = DEADLINE) -> CodeReward:
    try:
        return CodeReward(timeout, isolation)
    except ValueError as problem:
        pytest.skip(str(problem))


@pytest.fixture(scope="module")
def isolated() -> CodeReward:
    return reward_of("bubblewrap")


def fenced(code: str) -> str:
    return f"So:\n```python\n{code}\n```\nDone."


@pytest.mark.parametrize("isolation", ["bubblewrap", "none"])
def test_a_completion_is_judged_by_all_tests_of_its_row(isolation) -> None:
    completions = [fenced(RIGHT), fenced("def f(x): return x + 1"), RIGHT, fenced("def f(x) return 2")]
    rewards = reward_of(isolation)(completions=completions, tests=[TESTS] * 4, other=[0] * 4)
    assert rewards == [1.0, 0.0, 0.0, 0.0]


RIGHT_ANSWERS = {
    "plain values come back as they are": (
        "def f(x): return [None, True, 2, 0.1, 'ä\\n', b'\\x00', (1, {2}), {(1,): set()}, 1j]",
        ["assert f(0) == [None, True, 2, 0.1, 'ä\\n', b'\\x00', (1, {2}), {(1,): set()}, 1j]"],
    ),
    "frozensets, at any depth and both ways": (
        "def f(x): return {frozenset(x), frozenset({frozenset()})}, {frozenset(x): [frozenset([1])]}\n"
        "def g(x): return isinstance(x[0], frozenset)",
        [
            "assert f([1, 2]) == ({frozenset({2, 1}), frozenset({frozenset()})}, {frozenset({1, 2}): [{1}]})",
            "assert g([frozenset('ab')]) and not g([set('ab')])",
            "assert f([1])[0] != {1} and isinstance(f([1])[1][frozenset([1])][0], frozenset)",
        ],
    ),
    "numbers that have no literal": (
        "def f(x): return [float('inf'), -float('inf'), float('nan'), -0.0, complex(float('inf'), -0.0), x]",
        [
            "a, b, c, d, e, g = f(math.inf)",
            "assert a == g == math.inf and b == -math.inf and math.isnan(c)",
            "assert str(d) == '-0.0' and e == complex(math.inf, -0.0)",
        ],
    ),
    "iterators": ("def f(n): yield from range(n)", ["assert list(f(3)) == [0, 1, 2]", "assert f(3) != [0, 1, 2]"]),
    "what a solution prints": ("print('#' * 100_000)\ndef f(x): print(x); return 2 * x", TESTS),
    "more digits than Python writes": ("def f(n): return 10 ** n", ["assert f(5000) == 10 ** 5000"]),
}


@pytest.mark.parametrize("name", RIGHT_ANSWERS)
def test_right_solutions_pass(name) -> None:
    solution, tests = RIGHT_ANSWERS[name]
    assert reward_of("none").passes(solution, tests)


EVERYWHERE = "for fd in range(64):\n  try: os.write(fd, {})\n  except OSError: pass\n"
CHEATS = {
    "exits with success": "import os\nos._exit(0)",
    "claims to have passed": "import os\n" + EVERYWHERE.format("b'ready\\n0123456789abcdef0123456789abcdef'"),
    "answers for itself": "import os\n" + EVERYWHERE.format("b'{\"value\": null}\\n' * 9"),
    "equals everything": "class A(int):\n  __eq__ = lambda *_: True\ndef f(x): return A(x + 9)",
    "passes itself on": "def f(x): return f",
    "patches Python": "import builtins\nbuiltins.AssertionError = SystemExit\n__debug__ if True else 0\n"
    "builtins.compile = builtins.exec = lambda *_: None\ndef f(x): return 0",
    "looks for the verdict": "import gc\nall = [o for o in gc.get_objects() if isinstance(o, dict) and 'nonce' in o]\n"
    "print(all[0]['nonce'])\ndef f(x): return 2 * x",
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ndef f(x): return 0",
    "patches a module of the tests": "import math\nmath.isclose = lambda *_: True\ndef f(x): return 0",
    "answers without end": "import os\nfor fd in range(3, 64):\n  try:\n    while True: os.write(fd, b'[' * 65536)\n"
    "  except OSError: pass",
    "answers too deeply": "def f(x):\n  a = []\n  for _ in range(10**5): a = [a]\n  return a",
    "eats memory": "a = bytearray(1 << 33)\ndef f(x): return 2 * x",
    "fills the disk": "for i in range(10**5):\n  open(str(i), 'wb').write(bytes(1 << 20))",
    "reads the judge": "import os\nfd = os.open(f'/proc/{os.getppid()}/mem', os.O_RDWR)\ndef f(x): return 2 * x",
}


@pytest.mark.parametrize("isolation", ["bubblewrap", "none"])
def test_hostile_programs_earn_nothing_and_the_next_one_is_judged(isolation) -> None:
    programs = {**CHEATS, "is right": RIGHT}
    if isolation == "none":  # which stops nothing that it does to the disk
        del programs["fills the disk"]
    earned = reward_of(isolation)(
        completions=[fenced(code) for code in programs.values()], tests=[TESTS] * len(programs)
    )
    assert dict(zip(programs, earned, strict=True)) == {name: float(name == "is right") for name in programs}


ENDLESS = ["while True: pass", "import time\ntime.sleep(10**6)", "def f(x):\n  while True: pass"]


def test_a_program_that_does_not_end_is_given_up(isolated) -> None:
    began = time.monotonic()
    reward = reward_of("bubblewrap", 0.5)
    assert reward(completions=[fenced(code) for code in ENDLESS], tests=[TESTS] * 3) == [0.0] * 3
    assert time.monotonic() - began < DEADLINE


def attempt(code: str) -> str:
    """A solution whose `f` gives the name of the error that `code` ends with, or None."""
    body = "\n".join(f"    {line}" for line in code.splitlines())
    return f"import os, sys\ndef f(x):\n  try:\n{body}\n  except BaseException as e: return type(e).__name__\n"


FORBIDDEN = {
    "starts a process": ("os.fork()", "BlockingIOError"),
    "starts a thread": ("import threading\nthreading.Thread(target=print).start()", "RuntimeError"),
    "eats memory": ("bytearray(1 << 33)", "MemoryError"),
    "writes a file": ("open('a', 'wb')", "OSError"),
    "reads the list of users": ("open('/etc/passwd')", "FileNotFoundError"),
    "sees processes": ("os.listdir('/proc')", "FileNotFoundError"),
    "becomes root": ("os.setuid(0) or os.chown('/dev', 0, 0) or os.chroot('/dev')", "OSError"),
    "opens a namespace of its own": (
        "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0", "AssertionError"
    ),
    "raises its limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (99, 99))", "ValueError"
    ),
    "sends": ("import socket\nsocket.create_connection(('192.0.2.1', 53), 5)", "OSError"),
}  # fmt: skip


def test_a_program_in_isolation_is_refused_what_it_tries(isolated) -> None:
    programs = [fenced(attempt(code)) for code, _ in FORBIDDEN.values()]
    kinds = [["OSError", "PermissionError"] if error == "OSError" else [error] for _, error in FORBIDDEN.values()]
    refused = isolated(completions=programs, tests=[[f"assert f(0) in {each}"] for each in kinds])
    assert dict(zip(FORBIDDEN, refused, strict=True)) == dict.fromkeys(FORBIDDEN, 1.0)


def test_a_program_sees_neither_environment_nor_files_nor_ports_of_the_trainer(isolated, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TRAINERS_SECRET", "1")
    (tmp_path / "file").write_text("1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        solution = f"""
import ctypes, os, socket
def environment(): return sorted(os.environ)
def everything(): return sorted(os.listdir("/"))
def folder(): return [os.getcwd(), os.path.exists({str(tmp_path)!r})]
def reached(): return socket.socket().connect_ex(("127.0.0.1", {port}))
def parent(): return os.getppid()
"""
        tests = [
            "assert set(environment()) <= {'LC_CTYPE', 'PWD'}, environment()",
            "assert not {'home', 'etc', 'proc', 'sys', 'tmp', 'var', 'run'} & set(everything())",
            "assert folder() == ['/', False]",
            "assert reached() != 0",
            "assert parent() in (1, 2)",
        ]
        assert isolated.passes(solution, tests)
    assert (tmp_path / "file").exists()


def test_programs_run_without_isolation_only_if_told_to(monkeypatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, **_: f"/nowhere/{name}")
    message = "No such file or directory: '/nowhere/bwrap'.*take passes_tests_unisolated"
    with pytest.raises(ValueError, match=message):
        CodeReward()
    assert load_reward("examples.code:passes_tests_unisolated")(completions=[fenced(RIGHT)], tests=[TESTS]) == [1.0]


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("```python\na = 1\n```", "a = 1\n"), ("```py\na\n```\nor\n```\nb\n```\nend", "b\n"), ("```Python3\n```", ""),
        ("no code", None), ("```python\na = 1", None), ("```rust\nlet a;\n```", None),
    ],
)  # fmt: skip
def test_code_is_the_last_closed_block(completion, code) -> None:
    assert fenced_code(completion) == code
