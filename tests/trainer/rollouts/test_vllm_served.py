"""The vLLM engine and `cfa-train` against a real server on a CPU: log-probs, kept ids, transports, a dead server."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from cfa_kernels.scoring.packed import packed_logprobs
from tests.support.embedded import EVERY_OTHER, SMALL, metrics_of
from tests.support.served import free_port
from trainer.__main__ import main
from trainer.rollouts.in_process import TransformersEngine
from trainer.rollouts.vllm import VllmEngine

pytest.importorskip("vllm", reason="vLLM is not installed; .ci/extras served has an environment with it")
pytestmark = [pytest.mark.slow, pytest.mark.traced, pytest.mark.filterwarnings("ignore")]

GAP = 3e-5  # nats, of a token
KEYS = [(3, i) for i in range(16)]


def policy_of(folder, adapters: bool = False):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if not adapters:
        return model
    return get_peft_model(
        model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    ).eval()


def moved(model, seed: int = 0):
    """Move all weights, or those of adapters, away from those that the server has."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or not hasattr(model, "peft_config"):
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


@pytest.fixture(scope="module")
def tokenizer(served):
    return AutoTokenizer.from_pretrained(served.folder, padding_side="left")


@pytest.fixture
def base(served, tokenizer):
    """The server with the weights that it was started with, which an adapter is added to."""
    VllmEngine(policy_of(served.folder), tokenizer, served.url, 0.02, weights="file")


def prompts_of(tokenizer, count: int = 16):
    return [tokenizer(f"What is 3 + {i}? Add 3 and {i}.")["input_ids"] for i in range(count)]


def largest_gap(policy, rollouts, temperature: float) -> float:
    ours = packed_logprobs(policy, rollouts.rows, temperature=temperature, kept_tokens=rollouts.kept_tokens)
    return max(float((a - b).abs().max()) for a, b in zip(rollouts.logprobs, ours, strict=True))


@pytest.mark.parametrize("how", ["file", "adapter"])
def test_completions_and_log_probs_are_the_policys_after_each_change_of_weights(served, tokenizer, base, how) -> None:
    policy = policy_of(served.folder, how == "adapter")
    engine = VllmEngine(policy, tokenizer, served.url, 0.02)
    assert any(note.endswith(f"takes weights by {how}") for note in engine.notes)
    prompts = [[*prompts_of(tokenizer, 1)[0] * 20, *row] for row in prompts_of(tokenizer, 4)]  # which the cache holds
    for seed in range(2):
        moved(policy, seed)
        engine.weights_changed()
        greedy = engine(prompts, max_completion_length=12)
        assert greedy.ids() == TransformersEngine(policy, tokenizer)(prompts, max_completion_length=12).ids()
        rollouts = engine(prompts, max_completion_length=24, keys=KEYS[:4])
        assert rollouts.kept_tokens is None
        assert largest_gap(policy, rollouts, 1.0) <= GAP


@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 0.95), (1.3, 0.9), (2.0, 0.95)])
def test_a_nucleus_is_replayed_over_the_ids_that_the_server_kept(served, tokenizer, temperature, top_p) -> None:
    policy = policy_of(served.folder)
    engine = VllmEngine(policy, tokenizer, served.url, 0.02)
    options = {"max_completion_length": 32, "temperature": temperature, "top_p": top_p}
    rollouts = engine(prompts_of(tokenizer), keys=KEYS, **options)
    assert largest_gap(policy, rollouts, temperature) <= GAP
    over_all = packed_logprobs(policy, rollouts.rows, temperature=temperature)
    assert max(float((a - b).max()) for a, b in zip(rollouts.logprobs, over_all, strict=True)) > 100 * GAP
    for kept in rollouts.kept_tokens:
        sums = torch.zeros(len(kept.counts), dtype=torch.float64).index_add_(0, kept.tokens(), kept.logprobs.exp())
        assert (sums - 1).abs().max() < 1e-4
    alone = engine(prompts_of(tokenizer)[3:4], keys=KEYS[3:4], **options)
    assert alone.ids() == rollouts.ids()[3:4]


def test_stop_strings_end_completions(served, tokenizer) -> None:
    policy = policy_of(served.folder)
    prompts = prompts_of(tokenizer, 2)
    whole = TransformersEngine(policy, tokenizer)(prompts, max_completion_length=12)
    stop = [tokenizer.decode(whole.ids()[0][4:6])]
    theirs = VllmEngine(policy, tokenizer, served.url, 0.02, stop=stop)(prompts, max_completion_length=12)
    ours = TransformersEngine(policy, tokenizer, stop=stop)(prompts, max_completion_length=12)
    assert theirs.ids() == ours.ids()
    assert theirs.rows.lengths[0] < 12


def test_another_model_is_named_before_it_is_sent_weights(served, tokenizer) -> None:
    policy = policy_of(served.folder)
    policy.config.num_hidden_layers = 5
    with pytest.raises(
        ValueError, match=r"serves another model, /.*untied: its num_hidden_layers are not the policy's"
    ):
        VllmEngine(policy, tokenizer, served.url, 0.02)
    with pytest.raises(ConnectionError, match=r"open a channel for vllm_weights=nccl .vllm_weights=file needs no GPU"):
        VllmEngine(policy_of(served.folder), tokenizer, served.url, 0.02, weights="nccl")


def test_a_server_that_is_stuck_is_waited_for_once(served, tokenizer, monkeypatch) -> None:
    engine = VllmEngine(policy_of(served.folder), tokenizer, served.url, 0.02)
    monkeypatch.setattr("trainer.rollouts.vllm._AT_ONCE", 2)
    session = engine._client.session
    session.request = lambda *_, own=session.request.func, **options: own(*_, **options | {"timeout": 2.0})
    served.signal(signal.SIGSTOP)
    began = time.monotonic()
    try:
        with pytest.raises(ConnectionError, match=r"did not complete sample \d: .*timed out"):
            engine(prompts_of(tokenizer), max_completion_length=4)
    finally:
        served.signal(signal.SIGCONT)
    assert time.monotonic() - began < 8


def argv_of(served, folder, *argv: str) -> list[str]:
    own = [
        f"--model={served.folder}",
        "--dtype=float32",
        f"--output_dir={folder}",
        "--rollout_engine=vllm",
        f"--vllm_server_base_url={served.url}",
    ]
    return [*SMALL, *own, "--max_completion_length=48", "--temperature=1.3", *argv]


@pytest.mark.parametrize(
    "argv",
    [
        ["--top_p=1", "--no_use_peft"], ["--top_p=0.9", "--no_use_peft", "--score_centering", "--loss_type=reinforce"],
        ["--config=calculator", "--no_use_peft", "--top_p=0.9"], ["--use_peft", "--top_p=0.9", "--learning_rate=1e-3"],
    ],
    ids=["plain", "nucleus", "turns", "adapter"],
)  # fmt: skip
def test_a_run_learns_from_what_the_server_samples(served, tmp_path, capsys, base, argv) -> None:
    assert main(argv_of(served, tmp_path / "run", EVERY_OTHER, *argv)) == 0
    way = "adapter" if "--use_peft" in argv else "file"
    assert f"vllm_weights: the server takes weights by {way}" in " ".join(capsys.readouterr().out.split())
    steps = [entry for entry in metrics_of(tmp_path / "run") if "loss" in entry]
    assert len(steps) == 2
    assert max(entry["sampling/sampling_logp_difference/max"] for entry in steps) <= GAP
    assert ("sampling/nucleus_cut" in steps[0]) == ("--top_p=1" not in argv)


@pytest.mark.parametrize("argv", [["--no_use_peft", "--parallel=fsdp2"], ["--use_peft"]], ids=["fsdp2", "ddp"])
def test_two_processes_ask_for_their_own_completions_and_the_first_sends(served, tmp_path, base, argv) -> None:
    launch = [f"--master_port={free_port()}", "--nproc_per_node=2", "-m", "trainer"]
    argv = argv_of(served, tmp_path / "run", EVERY_OTHER, "--top_p=0.9", "--eval_problems=2", *argv)
    command = [sys.executable, "-m", "torch.distributed.run", *launch, *argv]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as started:
        try:
            said = started.communicate(timeout=120)[1]
        finally:
            started.terminate()  # it ends the processes that it started
    assert started.returncode == 0, said
    steps = [entry for entry in metrics_of(tmp_path / "run") if "loss" in entry]
    assert len(steps) == 2
    assert max(entry["sampling/sampling_logp_difference/max"] for entry in steps) <= GAP


KILLED = []


def killing(completions: list[str], **_) -> list[float]:
    """A reward that kills the server in its second step."""
    KILLED[0](len(KILLED))
    KILLED.append(None)
    return [float(i % 2) for i in range(len(completions))]


def test_a_run_whose_server_was_killed_resumes_with_another(served, tmp_path, capsys, base) -> None:
    KILLED[:] = [lambda calls: served.kill() if calls == 2 else None]
    argv = ["--max_steps=3", "--save_steps=1", f"--reward_funcs={__name__}:killing", "--use_peft"]
    began = time.monotonic()
    assert main(argv_of(served, tmp_path / "run", *argv)) == 1
    assert time.monotonic() - began < 60
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert f"the vLLM server at {served.url} did not take weights by vllm_weights=adapter" in errors[0]
    served.start()
    KILLED[:] = [lambda _: None]
    assert main(argv_of(served, tmp_path / "run", *argv)) == 0
    assert [entry["step"] for entry in metrics_of(tmp_path / "run") if "loss" in entry] == [1, 2, 3]
    assert os.path.isdir(tmp_path / "run" / "adapter")
