"""What the tests of integrations share: one thread, a trainer of TRL, and processes that start from clean imports."""

import gc
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from typing import Any

import pytest
import torch

from tests.support.forking import server


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Models of these sizes gain nothing by threads, and wait for them where other processes keep the cores busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="package")
def processes() -> BaseContext:
    """Starts processes by forking one that has imported the library alone and then TRL, once for all of them."""
    return server()


@pytest.fixture(scope="package")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    pytest.importorskip("trl", reason="TRL is not installed")
    from tests.support import trl_training

    def run(*args: Any, **options: Any) -> Any:
        return trl_training.train(str(tmp_path_factory.mktemp("run")), *args, **options)

    gc.freeze()  # as after collection: what has been imported since, TRL's parts among it
    return run
