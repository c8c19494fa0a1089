"""Processes that tests fork from one server, which has imported what takes seconds, once for all files of tests."""

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from unittest import mock

PRELOADED = [
    "tests.support.imports_alone",  # first: it looks at what the library brings with it
    "cfa_kernels.integrations.trl", "datasets", "peft",
    "tests.support.sharded", "tests.support.models", "tests.support.runs", "tests.support.embedded",
    "tests.support.warm",  # last
]  # fmt: skip


def server() -> ForkServerContext:
    """The context whose server has imported `PRELOADED`; a process has one, so whoever is first must name all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1"):  # they talk by gloo, on the CPU
        forkserver.ensure_running()
    return context
