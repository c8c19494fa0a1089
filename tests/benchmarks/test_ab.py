"""Every block of `speed ab` runs on a CPU; one that takes too long is skipped."""

import json
import time

import pytest
import torch

from benchmarks.speed import ab, predictions, variants
from benchmarks.speed.predictions import figures_of, plain_name
from benchmarks.speed.program_step import PRESETS_RACED

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
        "long": {"TRL, 2 rows at a time", f"{ab.NEAREST}, {ab.AS_RACED}", f"{ab.VARLEN}, {ab.AS_RACED}"},
        "trainer": {*PRESETS_RACED, "fixed and a token"},
        "answers": {*PRESETS_RACED},
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
    lines = {line["name"]: line for line in document["parts"]["trl"]["result"] if line["group"] == "4x8"}
    assert lines[f"{ab.PLAIN}, {ab.AS_RACED}"]["of_trl"] > 0
    for line in figures_of(document["parts"]["profile"]):
        assert line["busy_parts"].keys() == line["idle_parts"].keys() >= {"forward", "loss", "backward"}
        assert 0 < sum(line["busy_parts"].values()) < line["busy_seconds"] * 1.01
    functions = [row["function"] for row in document["parts"]["profile"]["result"]["host"]["credit"]]
    assert any("(run_plan)" in function for function in functions)
    whole = {(line["group"], line["name"]): line for line in figures_of(document["parts"]["trainer"])}
    for load in ("six spans", "GSM8K's spans"):
        line, plain = (whole[f"{load}, 400 tokens sampled", name] for name in ("cf", "off"))
        assert line["adds"] == pytest.approx(line["whole_step"] / plain["whole_step"] - 1)
        assert plain["adds"] == 0
    assert document["predicted"] == json.loads(json.dumps([one._asdict() for one in predictions.PREDICTED]))
    printed = capsys.readouterr().out
    assert "4x8: ours, HF's layers: " in printed
    assert "trl: 4x8, ours, seconds.median: predicted 0.138, came " in printed


def a_document(cpp, merged):
    line = {"group": "4x8", "name": f"{predictions.MERGED.removesuffix(variants.MERGED)}, compiled{variants.MERGED}"}
    parts = {"trl": {"result": [line | {"seconds": {"median": merged}}]}}
    return {"cpp_wrapper": cpp, "parts": parts}


def test_rules_decide_by_the_figure_that_they_name_and_by_no_other():
    rule = next(rule for rule in predictions.RULES if rule.what.cpp)
    for merged, follows in ((0.27, rule.above), (0.25, rule.below)):
        decided, *undecided = sorted(
            predictions.decisions([a_document(False, 9.0), a_document(True, merged)]).splitlines()
        )
        assert decided.startswith("decided: ")
        assert decided.endswith(f"came {merged}: {follows}")
        assert [line.partition(":")[0] for line in undecided] == ["undecided"] * (len(predictions.RULES) - 1)
    assert plain_name(a_document(True, 0.0)["parts"]["trl"]["result"][0]["name"]) == predictions.MERGED


def test_a_block_that_exceeds_its_limit_or_finds_no_budget_is_skipped_with_a_line(tmp_path, monkeypatch, capsys):
    ran = []
    quick = lambda bench: ran.append(bench) or [], 9.0

    def slow(bench):
        bench.finished += [{"group": "g", "name": "done", "seconds": {"median": 1.5}}]
        assert 0 < bench.seconds_left < 0.2
        time.sleep(30)

    blocks = {"slow": (slow, 0.2), "next": quick, "last": quick}
    monkeypatch.setattr(ab, "BLOCKS", {**blocks, "broken": (lambda bench: [1 // 0], 9.0)})
    monkeypatch.setattr(ab, "LEAST", 0.1)
    arguments = ["--device", "cpu", "--commit", "abc", "--into", str(tmp_path / "ab.json"), "--blocks"]
    assert ab.main([*arguments, "slow,next,broken", "--budget", "60"]) == 1
    parts = json.loads((tmp_path / "ab.json").read_text())["parts"]
    assert parts["slow"]["skipped"] == "the block ran for more than 0.2 s"
    assert [line["name"] for line in figures_of(parts["slow"])] == ["done"]
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
    step = variants.trl_step(bench, "4x8", liger=True)

    def kernels():
        model = step.replay.causal.model
        return model.norm.forward.__module__, model.layers[0].mlp.forward.__module__

    before = kernels()
    with step.variant():
        assert all("liger" in module for module in kernels())
        assert "liger" not in bench.model.base_model.model.model.norm.forward.__module__
    assert kernels() == before
