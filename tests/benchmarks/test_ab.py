"""Every block of `speed ab` runs on a CPU; one that takes too long is skipped."""

import json
import time

import pytest
import torch

from benchmarks.harness import figures
from benchmarks.harness.results import figures_of
from benchmarks.speed import ab

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.mark.filterwarnings("ignore")
def test_all_blocks_run_on_a_cpu(tmp_path, capsys):
    file = tmp_path / "ab.json"
    assert ab.main(["--device", "cpu", "--smoke", "--rounds", "1", "--into", str(file)]) == 0
    document = json.loads(file.read_text())
    assert document["parts"].keys() == ab.BLOCKS.keys()
    assert document["command"] == "python -m benchmarks speed ab --device cpu --smoke --rounds 1 --into ab.json"
    assert document["parts"]["host"]["result"]["ceilings"]["launch_microseconds"]["aten add"] > 0
    expected = {
        "liger": {f"{name}, {ab.AS_RACED}" for name in (ab.PLAIN, ab.EXACT)},
        "trl": {ab.WHOLE, f"{ab.PLAIN}, {ab.AS_RACED}", f"{ab.EXACT}, {ab.AS_RACED}{ab.MERGED}"},
        "long": {f"{ab.PLAIN}, of {ab.TRL}", f"{ab.PLAIN}, of {ab.VARLEN}"},
        "trainer": {"cf", "cf, merged", "prefix_gain_positive"},
    }
    for block, part in document["parts"].items():
        assert part["took"] > 0
        lines = {line["name"]: line for line in figures_of(part)}
        assert block == "host" or lines.keys() >= expected.get(block, set()) != {}
        for line in lines.values():
            assert "failed" not in line
    first = document["parts"]["liger"]["result"][0]
    assert first["gradient_off"] == 0
    assert first["seconds"]["median"] > 0
    printed = capsys.readouterr().out
    assert "| 4x8 | ours, HF's layers | " in printed
    assert figures.main([str(file)]) == 0


def test_a_block_that_exceeds_its_limit_or_finds_no_budget_is_skipped_with_a_line(tmp_path, monkeypatch, capsys):
    ran = []
    quick = lambda bench: ran.append(bench) or [], 9.0
    blocks = {"slow": (lambda bench: time.sleep(30), 0.2), "next": quick, "last": quick}
    monkeypatch.setattr(ab, "BLOCKS", {**blocks, "broken": (lambda bench: [1 // 0], 9.0)})
    monkeypatch.setattr(ab, "LEAST", 0.1)
    arguments = ["--device", "cpu", "--commit", "abc", "--into", str(tmp_path / "ab.json"), "--blocks"]
    assert ab.main([*arguments, "slow,next,broken", "--budget", "60"]) == 1
    parts = json.loads((tmp_path / "ab.json").read_text())["parts"]
    assert parts["slow"]["skipped"] == "the block ran for more than 0.2 s"
    assert "result" in parts["next"]
    assert parts["broken"]["failed"].startswith("ZeroDivisionError")
    assert ab.main([*arguments, "last", "--budget", "0"]) == 1
    parts = json.loads((tmp_path / "ab.json").read_text())["parts"]
    assert parts["last"]["skipped"].endswith("s of the budget were left")
    printed = capsys.readouterr()
    assert "== slow is skipped: the block ran for more than 0.2 s" in printed.out
    assert "== last is skipped: " in printed.out
    assert "failed or skipped: slow, broken" in printed.err
    assert len(ran) == 1


@pytest.mark.filterwarnings("ignore")
def test_trls_liger_is_in_the_layers_of_its_own_policy_while_it_runs():
    pytest.importorskip("liger_kernel")
    bench = ab.Bench(CPU, smoke=True, budget=60, rounds=1)
    step = ab.trl_step(bench, "4x8", liger=True)

    def kernels():
        model = step.replay.causal.model
        return model.norm.forward.__module__, model.layers[0].mlp.forward.__module__

    before = kernels()
    with step.variant():
        assert all("liger" in module for module in kernels())
        assert "liger" not in bench.model.base_model.model.model.norm.forward.__module__
    assert kernels() == before
