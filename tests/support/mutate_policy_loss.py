"""Mutation testing of the policy loss: change one term of a formula or kernel, and some test must fail.

A mutant drops, flips or swaps one term of the functions in `TARGETS`. It is loaded beside the real package, its
functions take the place of the real ones, and tests of this suite run on it until one fails.

`python -m tests.support.mutate_policy_loss` runs all mutants and lists those that no test noticed (about ten minutes);
`test_mutations_of_policy_loss.py` runs a sample.
"""

import ast
import copy
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
OPS = REPOSITORY / "cfa_kernels" / "ops"
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from cfa_kernels.losses import policy as losses  # noqa: E402  after the environment is set
from cfa_kernels.losses.policy import LEVELS  # noqa: E402
from cfa_kernels.ops import head_matmul, policy_rows  # noqa: E402
from tests.losses import test_policy as on_logprobs  # noqa: E402
from tests.losses import test_policy_trl as on_trl  # noqa: E402
from tests.ops import test_policy_loss_kernels as kernels  # noqa: E402
from tests.ops import test_policy_loss_steps as steps  # noqa: E402
from tests.support.as_on_gpu import DEVICE  # noqa: E402
from tests.support.policy_problem import of_hidden, of_logits, tiles_of_32  # noqa: E402

TARGETS = {
    "token_loss": ("token_terms", "policy_terms", "token_terms_triton"),
    "row_softmax": (
        "probabilities", "row_logprobs_reference", "row_gradients_reference",
        "load_logits", "row_sums", "target_logprob", "_write_some", "write_gradient",
    ),
    "policy_rows": ("policy_of_logprobs", "row_gradients_kernel", "policy_rows_kernel"),
    "linear_policy_loss": ("contributing", "add", "_without_dead_rows", "linear_policy_loss_op", "_backward"),
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
        before = ast.get_source_segment(source, node) if hasattr(node, "lineno") else None
        if before is None or any(name in before for name in ADDRESSING):
            continue
        for variant in _variants(node):
            after = "pass" if variant is None else f"({ast.unparse(variant)})"
            start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
            stop = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
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


def checks(mutant: Mutant) -> Iterator[Callable[[], None]]:
    """Tests of this suite on inputs that make them quick, the likeliest to fail first."""
    if mutant.module == "linear_policy_loss":
        yield from (*_chunk_tests(), *_reference_tests())
    elif mutant.function.endswith(("_triton", "_kernel")) or mutant.function in DEVICE_FUNCTIONS:
        yield from _kernel_tests()
    else:
        yield from _reference_tests()


def _chunk_tests() -> Iterator[Callable[[], None]]:
    for level, clipped, kept in steps.CLIPPED:
        test = steps.test_clipped_rows_are_cut_out_of_a_chunk_if_they_are_a_tenth_of_it
        yield partial(_with_monkeypatch, partial(test, level, clipped, kept, True, False, device=DEVICE))
    test = steps.test_tokens_without_weight_or_advantage_are_never_multiplied
    yield partial(_with_monkeypatch, partial(test, device=DEVICE))
    for case in steps.CONTRIBUTING:
        yield partial(steps.test_contributing_rows_look_at_counted_tokens_alone, *case)


def _with_monkeypatch(test: Callable[..., None]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        test(monkeypatch=monkeypatch)


def _kernel_tests() -> Iterator[Callable[[], None]]:
    for dtype, feature, loss_type, level in (
        (torch.float32, "all", "dapo", "token"),
        (torch.float32, "weights", "cispo", "token"),
        (torch.float32, "corrected-kl", "sapo", "token"),
        (torch.float32, "all", "grpo", "sequence"),
        (torch.float32, "plain", "dapo", "token"),
        (torch.float32, "kl", "luspo", "sequence"),
        (torch.float32, "low-delta", "dapo", "token"),
    ):
        test = kernels.test_kernels_stay_within_the_error_budget
        yield partial(test, of_logits, dtype, feature, loss_type, level, DEVICE, None)
    for known in (False, True):
        test = kernels.test_row_gradients_serve_rows_with_only_one_of_the_two_derivatives
        yield partial(test, "triton", known, DEVICE, None)
    for case in kernels.EXTREME:
        test = kernels.test_extreme_logits_give_finite_and_exact_results
        yield partial(test, *case.values, 9, "triton", DEVICE, None)
    for level in LEVELS:
        test, feature = kernels.test_kl_and_entropy_keep_rows_without_advantage, {"entropy_coef": 0.1}
        yield partial(test, of_logits, "triton", level, feature, DEVICE)
    yield partial(kernels.test_a_clipped_or_weightless_row_gets_exact_zeros, "triton", DEVICE, None)
    test = kernels.test_a_target_outside_the_vocabulary_that_nobody_checks_gives_a_nan_loss
    yield partial(test, False, "token", DEVICE)
    for shift in (100.0, -100.0):
        for loss_type in ("dapo", "sapo"):
            test = kernels.test_log_ratios_far_out_stay_finite_and_equal_the_reference
            yield partial(test, of_logits, shift, loss_type, DEVICE)


def _reference_tests() -> Iterator[Callable[[], None]]:
    for feature in ("all", "weights", "plain", "kl", "softcap"):
        for level in LEVELS:
            for loss_type in ("dapo", "cispo", "sapo"):
                for form in (of_logits, of_hidden):
                    test = kernels.test_forms_agree_with_policy_loss_on_log_probs
                    yield partial(test, form, loss_type, level, feature)
    for level in LEVELS:
        for loss_type in ("dapo", "cispo", "sapo"):
            yield partial(on_logprobs.test_gradient_passes_gradcheck, loss_type, level, True)
            for shift in (100.0, -100.0):
                test = on_logprobs.test_log_ratios_of_100_stay_finite
                yield partial(test, loss_type, level, torch.float32, shift)
            tokens, options = on_trl.make_tokens(), {"beta": 0.05, "use_bias_correction_kl": True}
            yield partial(on_trl.test_loss_gradient_and_metrics_equal_trl, tokens, loss_type, level, options)
    for level in LEVELS:
        yield partial(on_logprobs.test_all_rows_masked_gives_zero_loss_and_zero_gradient, "dapo", level)
    for loss_type in ("dapo", "sapo"):
        for beta in (0.0, 0.1):
            yield partial(on_logprobs.test_nothing_beyond_the_cut_off_has_a_gradient, loss_type, beta)
    yield on_logprobs.test_a_ratio_of_e_to_the_100_is_clipped_for_positive_and_capped_by_delta_for_negative_advantages
    for level in LEVELS:
        yield partial(kernels.test_reference_gradients_pass_gradcheck, level)
        yield partial(steps.test_chunks_and_dropped_rows_change_nothing, "torch", level, torch.float64, 1e-13, DEVICE)
        for form in (of_logits, of_hidden):
            yield partial(kernels.test_padding_may_hold_anything, form, "torch", level, DEVICE, None)
            test, feature = kernels.test_kl_and_entropy_keep_rows_without_advantage, {"entropy_coef": 0.1}
            yield partial(test, form, "torch", level, feature, DEVICE)
    for case in kernels.EXTREME:
        yield partial(kernels.test_extreme_logits_give_finite_and_exact_results, *case.values, 9, "torch", DEVICE, None)
    test = kernels.test_row_gradients_serve_rows_with_only_one_of_the_two_derivatives
    yield partial(test, "torch", False, DEVICE, None)
    yield partial(kernels.test_the_reference_works_in_float32_and_rounds_a_half_gradient_once, False, DEVICE)


def one_of_each() -> list[Callable[[], None]]:
    """A check by every test that any mutant meets."""
    everything = (*_chunk_tests(), *_kernel_tests(), *_reference_tests())
    return list({getattr(check, "func", check): check for check in everything}.values())


def noticed(mutant: Mutant, tests: Iterable[Callable[[], None]] | None = None) -> bool:
    """Whether a test fails on the mutant: one of `checks`, or of `tests` if given."""
    with loaded(mutant), mock.patch.object(policy_rows, "launch_options", tiles_of_32):
        for check in checks(mutant) if tests is None else tests:
            try:
                check()
            except Exception:  # whatever a wrong term leads to
                return True
    return False


def main() -> int:
    """Run every mutant, or those whose description holds the argument; 1 if one goes unnoticed for no known reason."""
    everything = [mutant for mutant in mutants() if not sys.argv[1:] or sys.argv[1] in str(mutant)]
    unnoticed = []
    for number, mutant in enumerate(everything, 1):
        if not noticed(mutant):
            unnoticed.append(mutant)
            print(f"[{number}/{len(everything)}] unnoticed: {mutant}", flush=True)
    unknown = [mutant for mutant in unnoticed if mutant.key not in EQUIVALENT]
    print(f"{len(everything)} mutants, {len(unnoticed)} unnoticed, of which {len(unknown)} without a known reason")
    return 1 if unknown else 0


if __name__ == "__main__":
    raise SystemExit(main())
