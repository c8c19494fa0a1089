"""Ahead-of-time compilation of Triton kernels for GPUs that are not here.

Reports are cached beside Triton's own cache: each by source, signature, options and compiler, and those of one call by
all sources of the library, so that no process has to start.
"""

import contextlib
import dataclasses
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from packaging.version import Version

from tests.support import wgmma

SPILLS = 16 if Version(triton.__version__) >= Version("3.8") else 0
"""Bytes of a lane that may spill: the compiler of Triton 3.8 spills one register in three of the builds."""


@dataclass(frozen=True)
class Target:
    """GPU family, and the limits of one program."""

    backend: str
    arch: int | str
    warp_size: int
    max_shared_memory: int  # bytes
    register_file: int  # 32-bit registers that the lanes of one program share
    max_registers: int  # that one lane can address


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 166_912, 65_536, 255),
    "sm_90": Target("cuda", 90, 32, 232_448, 65_536, 255),
    "sm_100": Target("cuda", 100, 32, 232_448, 65_536, 255),
    "gfx942": Target("hip", "gfx942", 64, 65_536, 131_072, 512),
}


@dataclass(frozen=True)
class AotCase:
    """One launch that is shipped, on one of `TARGETS`."""

    name: str
    kernel: str  # "module of cfa_kernels:function"
    target: str
    # Types of run-time arguments: "*bf16", "i32", "fp32", "tensordesc<bf16[128, 64]>"; with ":16" multiples of 16.
    arguments: Mapping[str, str]
    options: Mapping[str, Any]  # the compiler's, and every other argument, None for a pointer that is left out

    @property
    def function(self) -> Any:
        """The kernel, perhaps as Triton's interpreter has it."""
        module, _, name = self.kernel.partition(":")
        return getattr(importlib.import_module(f"cfa_kernels.{module}"), name)

    def with_ones(self) -> "AotCase":
        """Return the build for a launch in which every integer is 1, which Triton makes a constant of the kernel."""
        jitted = self.function
        options = jitted.kwargs if hasattr(jitted, "kwargs") else vars(jitted)
        lasting = options["do_not_specialize"] or ()
        ones = [name for name, kind in self.arguments.items() if kind[0] == "i" and name not in lasting]
        arguments = {name: kind for name, kind in self.arguments.items() if name not in ones}
        options = self.options | dict.fromkeys(ones, 1)
        return dataclasses.replace(self, name=f"{self.name} ones", arguments=arguments, options=options)


@dataclass(frozen=True)
class AotReport:
    """Result of compiling a case."""

    name: str
    target: str
    registers: int  # 32-bit, a lane (on gfx942: architectural and accumulation VGPRs together)
    spills: int  # bytes (NVIDIA) or registers (AMD), stores and loads together
    stack: int  # bytes of local memory a lane
    shared_memory: int  # bytes a program
    threads: int
    serialized: str  # ptxas's complaint that wgmma instructions run one at a time, or ""
    assembly: str  # PTX or AMDGCN
    sass: str  # machine code, if there is wgmma

    @property
    def is_nvidia(self) -> bool:
        return TARGETS[self.target].backend == "cuda"

    @property
    def blocks(self) -> int:
        """Programs that an NVIDIA multiprocessor holds at once."""
        limits = TARGETS[self.target]
        registers = -(-self.registers // 8) * 8
        shared = (limits.max_shared_memory + 1024) // (self.shared_memory + 1024)  # 1 KiB a program is the driver's
        return min(limits.register_file // (registers * self.threads), shared, 2048 // self.threads)

    def __str__(self) -> str:
        return (
            f"{self.name:60s} {self.target:7s} registers {self.registers:4d}  spills {self.spills:4d}  "
            f"stack {self.stack:4d}  shared {self.shared_memory:7d}"
        )

    def assert_fits(self, max_shared_memory: int | None = None) -> None:
        """Assert that no more than `SPILLS` spill, that wgmma is sound and parallel and the target large enough."""
        limits = TARGETS[self.target]
        assert max(self.spills, self.stack) <= SPILLS, str(self)
        assert not self.serialized, f"{self}\n{self.serialized}"
        self.assert_sound()
        assert self.registers * self.threads <= limits.register_file, str(self)
        assert self.registers <= limits.max_registers, str(self)
        assert self.shared_memory <= (max_shared_memory or limits.max_shared_memory), str(self)

    def assert_sound(self) -> None:
        """Assert that no register is written while a product still reads it."""
        overwritten = wgmma.overwritten_inputs(self.sass)
        assert not overwritten, "\n".join([str(self), *overwritten])

    def assert_watched(self, inputs: int) -> None:
        """Assert that so many products have a register input, which `assert_sound` sees once waits are gone."""
        assert sum(line.register_input is not None for line in wgmma.parse(self.sass)[0]) >= inputs, self.name
        assert wgmma.overwritten_inputs(re.sub(r".*WARPGROUP\.DEPBAR.*\n", "", self.sass)), self.name


def compile_cases(cases: Iterable[AotCase]) -> list[AotReport]:
    """Compile every case in processes without `TRITON_INTERPRET`, so that it works beside interpreter tests."""
    cases = list(cases)
    names = [(case.name, case.target) for case in cases]
    assert len(set(names)) == len(names), f"case names are not unique: {names}"
    package = Path(importlib.import_module("cfa_kernels").__file__).parent
    cached = _cache_file([*(path.read_text() for path in sorted(package.rglob("*.py"))), *map(repr, cases)])
    if cached.exists():
        return [AotReport(**report) for report in json.loads(cached.read_text())]
    # Spawned, not forked: this process, or the server that its forks come from, may have imported interpreted kernels.
    context = multiprocessing.get_context("spawn")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    # One process where workers of the suite keep all cores busy: each takes seconds before its first build.
    busy = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)) >= (os.cpu_count() or 1)
    pool = ProcessPoolExecutor(1 if busy else None, mp_context=context)
    with mock.patch.dict(os.environ, environment, clear=True), pool:
        reports = list(pool.map(_compile, cases))
    _write(cached, [dataclasses.asdict(report) for report in reports])
    return reports


def _cache_file(key: list[Any]) -> Path:
    """Where a result is kept: by its key, by the compiler and by what this file makes of its output."""
    own = [triton.__version__, Path(__file__).read_text(), *key]
    return Path(triton.knobs.cache.dir, "cfa_kernels_aot", hashlib.sha256(json.dumps(own).encode()).hexdigest())


def _write(cached: Path, result: Any) -> None:
    cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=cached.parent, delete=False) as file:
        json.dump(result, file)
    os.replace(file.name, cached)


def _compile(case: AotCase) -> AotReport:
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, limits = case.function, TARGETS[case.target]
    constants = {name: value for name, value in case.options.items() if name in kernel.arg_names}
    options = {name: value for name, value in case.options.items() if name not in constants}
    differing = (set(case.arguments) | set(constants)) ^ set(kernel.arg_names)
    assert not differing, f"{case.name}: arguments that differ: {differing}"
    signature, attributes = {}, {}
    for position, argument in enumerate(kernel.arg_names):
        kind, _, multiple = case.arguments.get(argument, "constexpr").partition(":")
        signature[argument] = kind
        if multiple:
            attributes[(position,)] = [["tt.divisibility", int(multiple)]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    cached = _cache_file([source.hash(), case.name, case.target, sorted(options.items())])
    if cached.exists():
        return AotReport(**json.loads(cached.read_text()))
    os.environ |= {"TRITON_DUMP_PTXAS_LOG": "1", "TRITON_ALWAYS_COMPILE": "1"}  # a cached build has no such log
    target = GPUTarget(limits.backend, limits.arch, limits.warp_size)
    with contextlib.redirect_stdout(io.StringIO()) as log:
        built = triton.compile(source, target=target, options=options)
    text = built.asm["amdgcn" if limits.backend == "hip" else "ptx"]
    report = AotReport(
        name=case.name, target=case.target, shared_memory=built.metadata.shared,
        threads=built.metadata.num_warps * limits.warp_size, assembly=text,
        sass=_disassemble(knobs.nvidia.nvdisasm.path, built.asm["cubin"]) if "wgmma.mma_async" in text else "",
        **(_read_amdgcn(text) if limits.backend == "hip" else _read_ptxas_log(log.getvalue())),
    )  # fmt: skip
    _write(cached, dataclasses.asdict(report))
    return report


def _disassemble(nvdisasm: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        # `-ndf`: no analysis of branch stacks, which takes half of the time and adds nothing to these listings.
        command = [nvdisasm, "-c", "-ndf", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _read_ptxas_log(log: str) -> dict[str, Any]:
    (registers,) = map(int, re.search(r"Used (\d+) registers", log).groups())
    numbers = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log).groups()
    stack, stores, loads = map(int, numbers)
    serialized = "\n".join(line for line in log.splitlines() if "wgmma" in line and "serialized" in line)
    return {"registers": registers, "stack": stack, "spills": stores + loads, "serialized": serialized}


def _read_amdgcn(text: str) -> dict[str, Any]:
    keys = ("vgpr_count", "private_segment_fixed_size", "vgpr_spill_count", "sgpr_spill_count")
    registers, stack, *spills = (int(re.search(rf"\.{key}:\s+(\d+)", text)[1]) for key in keys)
    return {"registers": registers, "stack": stack, "spills": sum(spills), "serialized": ""}
