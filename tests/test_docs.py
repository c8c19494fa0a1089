"""Every python block of docs/ runs, in the order of its page (tests/test_examples.py: README.md's); the site builds."""

import importlib
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cfa_kernels import CounterfactualConfig, Rows, counterfactual_credit
from docs import options
from tests.support.tiny import PHRASES, tiny_model, tiny_tokenizer

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python(?: requires=(?P<package>\S+))?\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)


def run(page: Path, namespace: dict[str, Any], in_place_of: dict[str, str] | None = None) -> int:
    """Run a page's blocks in one namespace; the number run. Blocks whose package cannot be imported are left out.

    Args:
        in_place_of: by the name of a variable that a block sets to a string, the string that it is set to here.
    """
    text, count = page.read_text(encoding="utf-8"), 0
    for block in BLOCK.finditer(text):
        if block["package"]:
            try:
                importlib.import_module(block["package"])
            except ImportError:
                continue
        line = text[: block.start()].count("\n") + 1
        code = block["code"]
        for name, path in (in_place_of or {}).items():
            code = re.sub(rf'^{name} = ".*"$', f"{name} = {path!r}", code, flags=re.MULTILINE)
        exec(compile("\n" * line + code, str(page), "exec"), namespace)
        count += 1
    return count


def downloads(folder: Path) -> dict[str, str]:
    """What pages take from the hub, tiny and on disk: a model with its tokenizer, problems, and where to write."""
    model = tiny_model()
    model.config.max_position_embeddings = 512  # pages sample as many tokens as they please
    model.save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "data").mkdir()
    row = json.dumps({"question": "What is 3 + 4 ?", "answer": "3 + 4 = 7\n#### 7"})
    (folder / "data" / "train.jsonl").write_text(f"{row}\n" * 16)
    (folder / "data" / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: train.jsonl\n---\n"
    )
    return {"model": str(folder / "model"), "data": str(folder / "data"), "output_dir": str(folder / "run")}


@pytest.mark.filterwarnings("ignore")
def test_the_first_block_for_trl_runs_when_it_is_pasted(tmp_path, monkeypatch):
    pytest.importorskip("trl", reason="trl is not installed")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    namespace: dict[str, Any] = {"__name__": "pasted"}
    assert run(REPOSITORY / "docs" / "trl.md", namespace, downloads(tmp_path)) in (2, 3)  # not all TRLs have AsyncGRPO
    trained = dict(namespace["trainer"].model.named_parameters())
    assert any(not torch.equal(value, trained[name]) for name, value in tiny_model().named_parameters())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", [page for page in PAGES[1:] if page.name != "trl.md"], ids=lambda page: page.name)
def test_the_examples_of_a_page_run(page, tmp_path):
    from datasets import Dataset

    torch.manual_seed(0)
    namespace = sampled() | {
        "model": tiny_model(),
        "tokenizer": tiny_tokenizer(),
        "prompt": "What is 3 + 4 ?",
        "reward": lambda text: float("#### 7" in text),
        "reward_function": lambda completions, **kwargs: [float("#### 7" in text) for text in completions],
        "dataset": Dataset.from_dict({"prompt": ["What is 3 + 4 ?"] * 16}),
        "output_dir": str(tmp_path),
        "__name__": "example",
    }
    before = [value.clone() for value in namespace["model"].parameters()]
    if not run(page, namespace):
        assert all(block["package"] for block in BLOCK.finditer(page.read_text(encoding="utf-8")))
        pytest.skip(f"what {page.name} needs is not installed")
    moved = any(not torch.equal(a, b) for a, b in zip(before, namespace["model"].parameters(), strict=True))
    assert moved == (page.name == "plain_pytorch.md")


def headings(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", prose):
            there = page.parent / target if target else page
            assert there.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in headings(there), f"{page.name}: {target}#{anchor}"


@pytest.mark.slow
def test_the_site_builds_and_none_of_its_links_leads_nowhere(tmp_path):
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", f"--site-dir={tmp_path}"]
    subprocess.run(command, cwd=REPOSITORY, check=True)


def test_tables_of_options_and_hosts_are_those_of_the_code():
    for page, written, made in options.pages():
        assert written == made, f"{page.name}: run python -m docs.options"
    own = {entry.name for entry in fields(CounterfactualConfig)} - {"spans", "answers"}
    assert own == set(options.OWN)


def sampled() -> dict[str, Any]:
    """Two completions of a prompt as lists of token ids, with spans, answers and an advantage each."""
    vocabulary = tiny_tokenizer().get_vocab()
    a, b, _, _, seven, five = (vocabulary[phrase] for phrase in PHRASES)
    return {
        "prompts": [torch.tensor([3, 4, 5])] * 2,
        "completions": [torch.tensor([a, b, seven, 1]), torch.tensor([b, five, 1])],
        "advantages": torch.tensor([1.0, -1.0]),
    }


@pytest.fixture(scope="module")
def others() -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "example"}
    assert run(REPOSITORY / "docs" / "other_trainers.md", namespace) == 6
    return namespace


@pytest.fixture(scope="module")
def rollouts() -> SimpleNamespace:
    """Three rollouts as (B, L) right-padded sequences with an advantage each; the last row has none."""
    vocabulary = tiny_tokenizer().get_vocab()
    a, b, c, d, seven, five = (vocabulary[phrase] for phrase in PHRASES)
    prompts = [[3, 4, 5], [9, 5, 10, 7], [3, 4, 5]]
    completions = [[a, b, c, seven, 1], [c, a, b, b, five, 1], [d, a, five]]
    ids, attention, mask = (torch.zeros(3, 10, dtype=torch.long) for _ in range(3))
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        n = len(prompt) + len(completion)
        ids[i, :n], attention[i, :n], mask[i, len(prompt) : n] = torch.tensor(prompt + completion), 1, 1
    each, weights = torch.tensor([1.2, -0.8, 0.0]), torch.ones(3, 10)
    rows = Rows(list(map(torch.tensor, prompts)), list(map(torch.tensor, completions)))
    options = {"advantages": each, "config": {"estimator": "masking"}}
    for i, row in enumerate(counterfactual_credit(tiny_model(), tiny_tokenizer(), rows, **options).weights):
        weights[i, len(prompts[i]) : len(prompts[i]) + len(row)] = row
    assert weights.unique().numel() > 3
    return SimpleNamespace(ids=ids, attention=attention, mask=mask, advantages=each[:, None] * mask, weights=weights)


def in_nemo_rl(r: SimpleNamespace, lines: dict[str, Any]) -> list[torch.Tensor]:
    data = {"input_ids": r.ids, "input_lengths": r.attention.sum(1), "token_mask": r.mask, "sample_mask": torch.ones(3)}
    data["advantages"] = torch.tensor([1.2, -0.8, 0.0])[:, None].expand(3, 10)
    lines["add_credit_nemo_rl"](data, tiny_model(), tiny_tokenizer())
    return [data["advantages"] * r.mask, r.advantages * r.weights]


def in_open_instruct(r: SimpleNamespace, lines: dict[str, Any]) -> list[torch.Tensor]:
    rho = torch.rand(3, 9, generator=torch.Generator().manual_seed(0))
    shifted = (r.mask[:, 1:], r.advantages[:, 1:])
    credited = lines["rho_weights_open_instruct"](rho, r.ids, r.attention, *shifted, tiny_model(), tiny_tokenizer())
    return [credited, rho * r.weights[:, 1:]]


def in_areal(r: SimpleNamespace, lines: dict[str, Any]) -> list[torch.Tensor]:
    rolled = {"loss_mask": r.mask.float().roll(-1, dims=-1), "advantages": r.advantages.roll(-1, dims=-1)}
    data = {"input_ids": r.ids, "attention_mask": r.attention, **rolled}
    lines["add_credit_areal"](data, tiny_model(), tiny_tokenizer())
    return [data["advantages"], (r.advantages * r.weights).roll(-1, dims=-1)]


def in_ms_swift(r: SimpleNamespace, lines: dict[str, Any]) -> list[torch.Tensor]:
    grpo = SimpleNamespace(completion_mask=r.mask[:, -7:], advantages=r.advantages[:, -7:])
    batch = {"grpo_batch": grpo, "input_ids": r.ids, "attention_mask": r.attention}
    lines["add_credit_ms_swift"](batch, tiny_model(), tiny_tokenizer())
    return [grpo.advantages, (r.advantages * r.weights)[:, -7:]]


def logprobs_and_gradients(r: SimpleNamespace, lines: dict[str, Any]) -> list[torch.Tensor]:
    model = tiny_model()
    logprobs = model(r.ids, attention_mask=r.attention).logits.log_softmax(-1)[:, :-1]
    padded = torch.nn.functional.pad(logprobs.gather(-1, r.ids[:, 1:, None])[..., 0], (1, 0)) * r.mask
    both = (lines["sequence_logprobs"](model, r.ids, r.attention, r.mask), padded)
    gradients = (torch.autograd.grad(x.sum(), list(model.parameters())) for x in both)
    return [*both, *(torch.cat([x.flatten() for x in each]) for each in gradients)]


@pytest.mark.parametrize("trainer", [in_nemo_rl, in_open_instruct, in_areal, in_ms_swift, logprobs_and_gradients])
def test_the_lines_for_another_trainer_weigh_what_it_multiplies_and_pack_what_it_pads(trainer, rollouts, others):
    pairs = trainer(rollouts, others)
    torch.testing.assert_close(pairs[::2], pairs[1::2], rtol=1e-4, atol=1e-5)
