"""Several estimators judge the same completions, in a file that the analysis reads."""

import pytest
import torch

from benchmarks.evidence.judge import NAMES, gradient_norms, judge
from cfa_kernels.hf.model import causal_lm
from cfa_kernels.rows import Rows
from cfa_kernels.scoring.training_forward import packed_forward
from tests.support.embedded import settings
from tests.support.pages import write_lines
from trainer.analyze.analysis import write_analysis
from trainer.analyze.samples import read_samples
from trainer.run import set_up

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trainer():
    return set_up(settings())


@pytest.fixture(scope="module")
def samples(trainer):
    return judge(trainer, 3, NAMES)


def test_every_estimator_judges_every_completion_with_an_advantage(samples, trainer):
    assert samples
    for sample in samples:
        assert sample["advantage"] != 0
        assert set(sample["estimators"]) == set(NAMES)
        for credit in sample["estimators"].values():
            (values,) = credit.values()
            assert len(values) == len(sample["tokens"]) == len(sample["gradient_norms"])
    assert {next(iter(samples[0]["estimators"][name])) for name in ("prefix_tree",)} == {"advantages"}
    assert any(sample["spans"] for sample in samples)


def test_norms_are_those_of_autograd_through_full_logits(trainer):
    prompts = [torch.tensor(trainer.prompts[0])]
    completion = torch.tensor([17, 21, 12, 30])
    model = causal_lm(trainer.policy)
    (norms,) = gradient_norms(packed_forward(model, Rows(prompts, [completion])), temperature=0.7)
    hidden = model.model(input_ids=torch.cat([prompts[0], completion])[None]).last_hidden_state[0]
    leaf = hidden[len(prompts[0]) - 1 : -1].detach().double().requires_grad_()
    logprobs = (leaf @ model.lm_head.weight.detach().double().t() / 0.7).log_softmax(-1)
    logprobs.gather(1, completion[:, None]).sum().backward()
    torch.testing.assert_close(norms.double(), leaf.grad.norm(dim=1), rtol=1e-4, atol=1e-5)


def test_the_analysis_reads_what_it_writes(samples, tmp_path):
    file = write_lines(tmp_path / "judged.jsonl", samples)
    assert all(set(sample.credit) == {*NAMES} for sample in read_samples(file))
    assert "prefix_tree" in (write_analysis(file) / "page.html").read_text("utf-8")
