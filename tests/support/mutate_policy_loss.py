"""Mutation testing of the policy loss: change one term of a formula or kernel, and some test must fail.

A mutant drops, flips or swaps one term of the functions in `TARGETS`. It is loaded beside the real package, its
functions take the place of the real ones, and pytest runs tests of this suite on it, in this process, until one fails.

`python -m tests.support.mutate_policy_loss` runs all mutants and lists those that no test noticed (about ten minutes);
`test_mutations_of_policy_loss.py` runs a sample.
"""

import argparse
import ast
import copy
import importlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
OPS = REPOSITORY / "cfa_kernels" / "ops"
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from cfa_kernels.losses import policy as losses  # noqa: E402  after the environment is set
from cfa_kernels.ops import head_matmul, policy_rows  # noqa: E402
from tests.support.policy_problem import tiles_of_32  # noqa: E402

TARGETS = {
    "token_loss": ("token_terms", "policy_terms", "token_terms_triton"),
    "row_softmax": (
        "probabilities", "row_logprobs_reference", "row_gradients_reference",
        "load_logits", "row_sums", "target_logprob", "_write_some", "write_gradient",
    ),
    "policy_rows": ("policy_of_logprobs", "row_gradients_kernel", "policy_rows_kernel"),
    "linear_policy_loss": ("contributing", "_without_dead_rows", "linear_policy_loss_op", "_backward"),
    "head_matmul": ("add",),
}  # fmt: skip
"""Functions to mutate, by module of `cfa_kernels.ops`."""

ADDRESSING = ("p_", "o_v", "stride", "i_n", "n_tiles", "BLOCK", "valid", "target")
"""Names that say where memory is: such lines stay as they are, for a wrong address ends the process, not a test."""

DEVICE_FUNCTIONS = ("load_logits", "row_sums", "target_logprob", "_write_some", "write_gradient")

REPLACED = (
    "policy_terms", "contributing", "linear_policy_loss_op", "logits_policy_loss_op", "LogitsPolicyLossInPlace",
)  # fmt: skip
"""What `cfa_kernels.losses.policy` takes from the mutated modules."""

CALLED_BY_TESTS = ("row_logprobs", "row_gradients")
"""What tests take from `policy_rows` itself."""

EQUIVALENT: dict[tuple[str, str, str], str] = {}
"""Why no test can tell: by function, what was there and what became of it."""


@dataclass(frozen=True)
class Mutant:
    """One change: `before` in the source of a function became `after`."""

    module: str
    function: str
    line: int
    before: str
    after: str
    source: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What identifies the change, wherever its line moves."""
        return self.function, self.before, self.after

    def __str__(self) -> str:
        return f"{self.module}.{self.function}:{self.line}: {self.before}  ->  {self.after}"


def _variants(node: ast.AST) -> Iterator[ast.AST | None]:
    """What a node may become; None stands for a statement left out."""
    match node:
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            flipped = copy.deepcopy(node)
            flipped.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
            yield flipped
            yield node.left
        case ast.BinOp(op=ast.Mult() | ast.Div()):
            yield node.left
            yield node.right
        case ast.BinOp(op=ast.BitAnd() | ast.BitOr()):
            yield node.left
            yield node.right
        case ast.UnaryOp(op=ast.USub()) if not isinstance(node.operand, ast.Constant):
            yield node.operand
        case ast.UnaryOp(op=ast.Invert()):
            yield node.operand
        case ast.Compare(ops=[op]):
            opposite = {ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.GtE: ast.Lt}
            opposite |= {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
            if type(op) in opposite:
                flipped = copy.deepcopy(node)
                flipped.ops = [opposite[type(op)]()]
                yield flipped
        case ast.Call(func=ast.Attribute(attr="where"), args=[_, first, second]):
            yield first
            yield second
        case ast.Call(func=ast.Attribute(attr="minimum" | "maximum"), args=[first, second]):
            yield first
            yield second
        case ast.Call(func=ast.Attribute(attr="clamp", value=value)):
            yield value
        case ast.AugAssign():
            yield None


def mutants() -> list[Mutant]:
    """Every change of one node in the functions of `TARGETS`."""
    found = []
    for module, functions in TARGETS.items():
        source = (OPS / f"{module}.py").read_text()
        lines = source.splitlines(keepends=True)
        for function in ast.walk(ast.parse(source)):
            if isinstance(function, ast.FunctionDef) and function.name in functions:
                found += _of_function(module, function, source, lines)
    return found


def _of_function(module: str, function: ast.FunctionDef, source: str, lines: list[str]) -> Iterator[Mutant]:
    for node in ast.walk(ast.Module(function.body, [])):
        for variant in _variants(node):
            start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
            stop = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
            before = source[start:stop]
            if any(name in before for name in ADDRESSING):
                break
            after = "pass" if variant is None else f"({ast.unparse(variant)})"
            changed = source[:start] + after + source[stop:]
            yield Mutant(module, function.name, node.lineno, " ".join(before.split()), after, changed)


@contextmanager
def loaded(mutant: Mutant) -> Iterator[None]:
    """The losses with the mutant's operators and functions in place of the real ones."""
    name = "mutant_ops"
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, name)
        shutil.copytree(OPS, package, ignore=shutil.ignore_patterns("__pycache__"))
        (package / f"{mutant.module}.py").write_text(mutant.source)
        for file in package.glob("*.py"):  # operators are registered once per process, so under a name of their own
            file.write_text(file.read_text().replace('"cfa_kernels::', f'"{package.parent.name}::'))
        with mock.patch.object(sys, "path", [folder, *sys.path]), mock.patch.object(sys, "dont_write_bytecode", True):
            importlib.invalidate_caches()
            names = (*TARGETS, "logits_policy_loss")
            parts = {part: importlib.import_module(f"{name}.{part}") for part in names}
        # Tests that set small tiles, or count products, do so on the real modules.
        parts["policy_rows"].launch_options = lambda *args, **kwargs: policy_rows.launch_options(*args, **kwargs)
        matrices = importlib.import_module(f"{name}.head_matmul")
        matrices.multiply = lambda *args, **kwargs: head_matmul.multiply(*args, **kwargs)
        with ExitStack() as stack:
            for part in parts.values():
                for key in set(vars(part)) & set(vars(losses)) & set(REPLACED):
                    stack.enter_context(mock.patch.object(losses, key, getattr(part, key)))
            for key in CALLED_BY_TESTS:
                stack.enter_context(mock.patch.object(policy_rows, key, getattr(parts["policy_rows"], key)))
            try:
                yield
            finally:
                for key in [key for key in sys.modules if key.partition(".")[0] == name]:
                    del sys.modules[key]


# Which tests, by what their names contain and the likeliest to fail first; of each only cases that are quick.

CHUNKS = (
    r"clipped_rows_are_cut_out_of_a_chunk.*-trained head-rows given",
    r"tokens_without_weight_or_advantage_are_never_multiplied",
    r"contributing_rows_look_at_counted_tokens_alone",
)

KERNELS = (
    r"kernels_stay_within_the_error_budget\[of_logits-dtype\d-(all|weights|corrected-kl|on-policy|low-delta)-",
    r"row_gradients_serve_rows_with_only_one.*\[triton",
    r"extreme_logits_give_finite_and_exact_results\[9-.*-triton",
    r"kl_and_entropy_keep_rows_without_advantage\[.*entropy_coef.*-triton-of_logits",
    r"a_clipped_or_weightless_row_gets_exact_zeros\[triton",
    r"target_outside_the_vocabulary_that_nobody_checks.*\[False-token",
    r"log_ratios_far_out_stay_finite.*\[(dapo|sapo)--?100.0-of_logits",
)

REFERENCES = (
    r"forms_agree_with_policy_loss_on_log_probs\[(all|weights|plain|kl|softcap)-(dapo|cispo|sapo)-",
    r"loss_gradient_and_metrics_equal_trl\[.*use_bias_correction_kl.*-(dapo|cispo|sapo)-",
    r"test_gradient_passes_gradcheck\[True-(dapo|cispo|sapo)-",
    r"log_ratios_of_100_stay_finite\[-?100.0-dtype\d-(dapo|cispo|sapo)-",
    r"all_rows_masked_gives_zero_loss_and_zero_gradient\[dapo-",
    r"nothing_beyond_the_cut_off_has_a_gradient",
    r"a_ratio_of_e_to_the_100_is_clipped_for_positive_and_capped_by_delta",
    r"reference_gradients_pass_gradcheck",
    r"chunks_and_dropped_rows_change_nothing\[torch-.*1e-13",
    r"padding_may_hold_anything\[torch-",
    r"kl_and_entropy_keep_rows_without_advantage\[.*entropy_coef.*-torch-",
    r"extreme_logits_give_finite_and_exact_results\[9-.*-torch",
    r"row_gradients_serve_rows_with_only_one.*\[torch-False",
    r"reference_works_in_float32_and_rounds_a_half_gradient_once\[False",
)

FILES = (
    "tests/losses/test_policy.py", "tests/losses/test_policy_trl.py",
    "tests/ops/test_policy_loss_kernels.py", "tests/ops/test_policy_loss_steps.py",
)  # fmt: skip


def judges(mutant: Mutant) -> tuple[str, ...]:
    """Names of the tests that a mutant has to face, in this order."""
    if mutant.module in ("linear_policy_loss", "head_matmul"):
        return CHUNKS + REFERENCES
    if mutant.function.endswith(("_triton", "_kernel")) or mutant.function in DEVICE_FUNCTIONS:
        return KERNELS
    return REFERENCES


class Mutation:
    """A plugin of pytest: the tests that it collects run on each mutant, instead of once."""

    def __init__(self, given: list[Mutant]) -> None:
        self.given, self.unnoticed, self.failed = given, list[Mutant](), False

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run every mutant, after the code as it is, which must pass one test by each name."""
        names = CHUNKS + KERNELS + REFERENCES
        cases = {name: [item for item in session.items if re.search(name, item.name)] for name in names}
        absent = [name for name in names if not cases[name]]
        if session.testsfailed or absent:
            raise pytest.UsageError(f"tests that are not there: {absent}")
        real = Mutant("token_loss", "", 1, "", "", (OPS / "token_loss.py").read_text())
        if self._notices(real, [cases[name][0] for name in names]):
            raise pytest.UsageError("tests fail on the code as it is: run them on their own")
        for number, mutant in enumerate(self.given, 1):
            if not self._notices(mutant, [item for name in judges(mutant) for item in cases[name]]):
                self.unnoticed.append(mutant)
                print(f"[{number}/{len(self.given)}] unnoticed: {mutant}", flush=True)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note that a test failed, for whatever a wrong term leads to."""
        self.failed |= report.failed

    def _notices(self, mutant: Mutant, items: list[pytest.Item]) -> bool:
        self.failed = False
        with loaded(mutant), mock.patch.object(policy_rows, "launch_options", tiles_of_32):
            for item in items:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                if self.failed:
                    return True
        return False


def main(argv: list[str] | None = None) -> int:
    """Run mutants; gives 1 if one goes unnoticed for no known reason, 2 if the tests cannot tell."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.mutate_policy_loss", description=__doc__)
    parser.add_argument("containing", nargs="?", default="", help="only mutants whose description contains it")
    parser.add_argument("--every", type=int, default=1, help="one mutant in so many")
    options = parser.parse_args(argv)
    given = [mutant for mutant in mutants() if options.containing in str(mutant)][:: options.every]
    mutation = Mutation(given)
    without = [f"-pno:{plugin}" for plugin in ("terminal", "benchmark", "xdist", "timeout", "cacheprovider")]
    files = [str(REPOSITORY / file) for file in FILES]
    ended = pytest.main(["--override-ini=addopts=", "--capture=no", *without, *files], plugins=[mutation])
    if ended not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return 2
    unknown = [mutant for mutant in mutation.unnoticed if mutant.key not in EQUIVALENT]
    print(f"{len(given)} mutants, {len(mutation.unnoticed)} unnoticed, {len(unknown)} of them without a known reason")
    return 1 if unknown else 0


if __name__ == "__main__":
    raise SystemExit(main())
