"""A real vLLM server on a CPU, started once for all tests that use it, and stopped with its group of processes.

Its model is the embedded one with an output layer of its own: vLLM 0.32 on a CPU keeps a tied one as it was.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

_SECONDS = 400.0
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip
# A seeded request whose prompt is cut by chunked prefill ends vLLM 0.32 on a CPU.
_OPTIONS = [
    "--dtype=float32", "--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens=8192",
    "--logprobs-mode=processed_logprobs", "--max-logprobs=256", "--enable-lora", "--max-lora-rank=64",
]  # fmt: skip


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


class Server:
    """A server of `folder`; `start` and `kill` may be called again, and the address changes."""

    url = ""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder.parent / "server.log"

    def start(self) -> None:
        """Start it and wait until it answers."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [str(Path(sys.executable).parent / "vllm"), "serve", str(self.folder), "--host=127.0.0.1"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, f"--port={port}", *_OPTIONS], stdout=log, stderr=subprocess.STDOUT,
                env=os.environ | _ENVIRONMENT, start_new_session=True,
            )  # fmt: skip
        until = time.monotonic() + _SECONDS
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            if self.process.poll() is not None or time.monotonic() > until:
                self.kill()
                pytest.fail(f"no vLLM server came up:\n{self.log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.3)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server and its workers, which outlive it if it alone is killed."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """End all its processes."""
        self.signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """Serve a copy of the embedded model whose output layer is not tied."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trainer.settings import ASSETS

    folder = tmp_path_factory.mktemp("served") / "untied"
    model = AutoModelForCausalLM.from_pretrained(ASSETS, dtype=torch.float32)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(ASSETS).save_pretrained(folder)
    server, before = Server(folder), os.environ.get("NO_PROXY")
    os.environ["NO_PROXY"] = "127.0.0.1"
    try:
        server.start()
        yield server
    finally:
        server.signal(signal.SIGTERM)  # so that it removes its shared memory
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(20)
        server.kill()
        os.environ["NO_PROXY"] = before or ""
