"""Ahead-of-time compilation of Triton kernels for GPUs that are not here.

A test lists the launches its op ships as `AotCase` values and calls `compile_cases` once per module. The
compilation runs in worker processes without `TRITON_INTERPRET`, so it works beside interpreter tests.
`python -m tests.support.aot N < cases.json > reports.json` is the entry those tests use.
"""

import contextlib
import dataclasses
import importlib
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.wgmma import overwritten_inputs, products_with_register_input

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Target:
    """One GPU family: what Triton calls it, and what one program may use on it."""

    backend: str
    arch: int | str
    warp_size: int
    max_shared_memory: int
    """Bytes of shared memory one program can have."""
    register_file: int
    """32-bit registers that the lanes of one program share."""
    max_registers: int
    """Registers one lane can address."""


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 166_912, 65_536, 255),
    "sm_90": Target("cuda", 90, 32, 232_448, 65_536, 255),
    "sm_100": Target("cuda", 100, 32, 232_448, 65_536, 255),
    "gfx942": Target("hip", "gfx942", 64, 65_536, 131_072, 512),
}


@dataclass(frozen=True)
class AotCase:
    """One launch that is shipped: a kernel with the argument types and options it runs with.

    `arguments` maps each run-time argument to a type: `"*bf16"`, `"i32"`, `"i64"`, `"fp32"` or
    `"tensordesc<bf16[128, 64]>"`. `":16"` appended says that the pointer or integer is a multiple of 16,
    as the launcher finds out at run time; a test of a kernel that is to vectorise its loads must say so.
    `constexprs` holds every other argument: numbers, `None` for a pointer that is left out, and dtypes by
    their name in triton.language (`"tl.bfloat16"`). `options` are the compiler's: num_warps, num_stages.
    """

    name: str
    kernel: str
    """`"package.module:function"`."""
    arguments: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    targets: Sequence[str] = tuple(TARGETS)


@dataclass(frozen=True)
class AotReport:
    """What the compiler made of one case on one target."""

    name: str
    target: str
    registers: int
    """32-bit registers a lane (on gfx942: architectural and accumulation VGPRs together)."""
    spills: int
    """Bytes (NVIDIA) or registers (AMD) moved to local memory, stores and loads together."""
    stack: int
    """Bytes of local memory a lane has."""
    shared_memory: int
    """Bytes of shared memory a program has."""
    tensor_memory: int
    """Tensor memory columns (sm_100)."""
    threads: int
    serialized: str
    """ptxas's complaint that it had to run wgmma instructions one at a time (slow), or `""`."""
    register_inputs: int
    """wgmma instructions that take their left operand from registers."""
    overwritten: list[str]
    """Those of them whose registers may be written before they are done (see `tests/support/wgmma.py`)."""
    asm: dict[str, str]
    """`ttgir`, `ptx` or `amdgcn`, and `sass` where there is wgmma."""

    @property
    def assembly(self) -> str:
        """The PTX or AMDGCN text."""
        return self.asm["amdgcn" if "amdgcn" in self.asm else "ptx"]

    @property
    def has_wgmma(self) -> bool:
        """Whether matrix products run on Hopper's warp-group instruction."""
        return "wgmma.mma_async" in self.assembly

    @property
    def blocks(self) -> int:
        """Programs that an NVIDIA multiprocessor holds at once; 1 KiB of shared memory a program is the driver's."""
        limits = TARGETS[self.target]
        registers = -(-self.registers // 8) * 8
        shared = (limits.max_shared_memory + 1024) // (self.shared_memory + 1024)
        return min(limits.register_file // (registers * self.threads), shared, 2048 // self.threads)

    def summary(self) -> str:
        """One line of the figures."""
        return (
            f"{self.name:44s} {self.target:7s} registers {self.registers:4d}  spills {self.spills:4d}  "
            f"stack {self.stack:4d}  shared {self.shared_memory:7d}  tensor memory {self.tensor_memory:4d}"
        )

    def assert_fits(self, *, max_registers: int | None = None, max_shared_memory: int | None = None) -> None:
        """Assert that nothing spills, wgmma is sound and in parallel, registers and shared memory fit the limits.

        The limits left out are the target's own: what a launch may use at all.
        """
        limits = TARGETS[self.target]
        assert self.spills == 0, self.summary()
        assert self.stack == 0, self.summary()
        assert not self.serialized, f"{self.summary()}\n{self.serialized}"
        assert not self.overwritten, "\n".join([self.summary(), *self.overwritten])
        assert self.registers * self.threads <= limits.register_file, self.summary()
        assert self.registers <= (max_registers or limits.max_registers), self.summary()
        assert self.shared_memory <= (max_shared_memory or limits.max_shared_memory), self.summary()


Reports = dict[tuple[str, str], AotReport]
"""By (case name, target)."""


def compile_kernel(
    kernel: Any,
    arguments: Mapping[str, str],
    constexprs: Mapping[str, Any],
    target: str,
    *,
    name: str | None = None,
    **options: Any,
) -> AotReport:
    """Compile one `@triton.jit` function for a target of `TARGETS`, in this process.

    `TRITON_INTERPRET` must not be set. Raises whatever the compiler raises, and `ValueError` if
    `arguments` and `constexprs` together are not the kernel's arguments.
    """
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    known = set(arguments) | set(constexprs)
    if known != set(kernel.arg_names):
        raise ValueError(f"{kernel.__name__}: arguments that differ: {known ^ set(kernel.arg_names)}")
    signature, attrs = {}, {}
    for position, argument in enumerate(kernel.arg_names):
        kind, _, multiple = arguments.get(argument, "constexpr").partition(":")
        signature[argument] = kind
        if multiple:
            attrs[(position,)] = [["tt.divisibility", int(multiple)]]
    values = {
        key: getattr(tl, value[3:]) if isinstance(value, str) and value.startswith("tl.") else value
        for key, value in constexprs.items()
    }
    limits = TARGETS[target]
    gpu = GPUTarget(limits.backend, limits.arch, limits.warp_size)
    log = io.StringIO()
    os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"  # a cached result has no ptxas log
    with contextlib.redirect_stdout(log):
        source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attrs)
        compiled = triton.compile(source, target=gpu, options=dict(options))
    metadata = compiled.metadata
    asm = {kind: compiled.asm[kind] for kind in ("ttgir", "ptx", "amdgcn") if kind in compiled.asm}
    figures = _read_amdgcn(asm["amdgcn"]) if "amdgcn" in asm else _read_ptxas_log(log.getvalue())
    if "wgmma.mma_async" in asm.get("ptx", ""):
        asm["sass"] = _disassemble(compiled.asm["cubin"])
    sass = asm.get("sass", "")
    return AotReport(
        name=name or kernel.__name__,
        target=target,
        shared_memory=metadata.shared,
        tensor_memory=getattr(metadata, "tmem_size", 0) or 0,
        threads=metadata.num_warps * limits.warp_size,
        register_inputs=products_with_register_input(sass),
        overwritten=overwritten_inputs(sass),
        asm=asm,
        **figures,
    )


def _disassemble(cubin: bytes) -> str:
    """The machine code of a cubin, by the nvdisasm that comes with Triton."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _read_ptxas_log(log: str) -> dict[str, Any]:
    registers = re.search(r"Used (\d+) registers", log)
    stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or stack is None:
        raise RuntimeError(f"no register count in the ptxas log:\n{log}")
    return {
        "registers": int(registers[1]),
        "stack": int(stack[1]),
        "spills": int(stack[2]) + int(stack[3]),
        "serialized": "\n".join(line for line in log.splitlines() if "wgmma" in line and "serialized" in line),
    }


def _read_amdgcn(text: str) -> dict[str, Any]:
    def figure(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", text)
        if found is None:
            raise RuntimeError(f"no {key} in the AMDGCN metadata")
        return int(found[1])

    return {
        "registers": figure("vgpr_count"),
        "stack": figure("private_segment_fixed_size"),
        "spills": figure("vgpr_spill_count") + figure("sgpr_spill_count"),
        "serialized": "",
    }


def compile_cases(cases: Iterable[AotCase], *, processes: int | None = None) -> Reports:
    """Compile every case for each of its targets.

    Runs in child processes without `TRITON_INTERPRET` and with a compilation cache of their own. Raises
    `RuntimeError` with the compiler's messages if any case fails.
    """
    cases = list(cases)
    names = [case.name for case in cases]
    if len(set(names)) != len(names):
        raise ValueError(f"case names are not unique: {names}")
    with tempfile.TemporaryDirectory() as cache:
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        environment["TRITON_CACHE_DIR"] = cache
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.aot", str(processes or os.cpu_count() or 1)],
            cwd=REPOSITORY,
            input=json.dumps([dataclasses.asdict(case) for case in cases]),
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"ahead-of-time compilation failed:\n{done.stderr[-8000:]}")
    results = json.loads(done.stdout)
    failures = [result["error"] for result in results if "error" in result]
    if failures:
        compiler = [line for line in done.stderr.splitlines() if "error:" in line]
        raise RuntimeError("\n".join(["ahead-of-time compilation failed:", *failures, *compiler]))
    return {(result["name"], result["target"]): AotReport(**result) for result in results}


def _compile_job(job: tuple[dict[str, Any], str]) -> dict[str, Any]:
    case, target = job
    module, _, function = case["kernel"].partition(":")
    kernel = getattr(importlib.import_module(module), function)
    try:
        report = compile_kernel(
            kernel, case["arguments"], case["constexprs"], target, name=case["name"], **case["options"]
        )
    except Exception as error:  # whatever the compiler raises belongs in the parent's message
        return {"error": f"{case['name']} on {target}: {type(error).__name__}: {error}"}
    return dataclasses.asdict(report)


def _main(read: Callable[[], str], processes: int) -> str:
    jobs = [(case, target) for case in json.loads(read()) for target in case["targets"]]
    for module in {case["kernel"].partition(":")[0] for case, _ in jobs}:
        with contextlib.suppress(Exception):  # a job says what is wrong
            importlib.import_module(module)
    context = multiprocessing.get_context("fork")  # what was imported, which takes seconds, is there
    with ProcessPoolExecutor(min(processes, max(len(jobs), 1)), mp_context=context) as pool:
        return json.dumps(list(pool.map(_compile_job, jobs)))


if __name__ == "__main__":
    print(_main(sys.stdin.read, int(sys.argv[1])))
