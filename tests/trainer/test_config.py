"""Settings: where they come from, which win, and what is said about a wrong one."""

import json
import re
import subprocess
import sys
from dataclasses import fields

import pytest

from cfa_kernels import CounterfactualConfig, __version__
from cfa_kernels.credit.config import part_options
from cfa_kernels.credit.weights import Range
from cfa_kernels.estimators.gradient import Gradient
from cfa_kernels.estimators.masking import Masking
from docs.options import documented
from tests.conftest import REPOSITORY
from tests.support.runs import config as settings
from trainer.__main__ import main
from trainer.cli import parse, parse_checked, to_yaml
from trainer.config import TrainConfig
from trainer.settings import TrainSettings


def unboxed(text: str) -> str:
    """The words of a message, without the frame and the line breaks of tyro's."""
    return " ".join(re.sub("[─│╭╮╰╯]|-{4,}", " ", text).split())


def message(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        settings(*argv)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    return unboxed(said.err)


def test_the_paper_run_is_one_line_and_has_the_paper_settings() -> None:
    config = settings("--config", "cf", "--model", "Qwen/Qwen3-1.7B", "--dataset", "openai/gsm8k")
    expected = {
        "credit": "cf", "loss_type": "dapo", "num_generations": 8, "use_peft": True, "lora_r": 32,
        "learning_rate": 2.5e-5, "generation_batch_size": 64,
        "max_steps": 500, "temperature": 0.6, "top_p": 0.95,
        "epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0, "reward_funcs": ["exact_match"],
    }  # fmt: skip
    assert {name: getattr(config, name) for name in expected} == expected
    credit = config.counterfactual()
    assert (credit.estimator, credit.weights, credit.spans.max_spans) == (Masking(), Range(0.5, 4.0, 1.5, 0.0), 10)


def test_flags_win_over_the_file_which_wins_over_the_model_folder_which_wins_over_the_defaults(tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    (model / "defaults.yaml").write_text("learning_rate: 0.5\nmax_steps: 5\ntemperature: 0.9\n")
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {model}\nmax_steps: 6\ntemperature: 0.8\nreward_funcs: [exact_match, math:gcd]\n")
    config = settings("--config", str(file), "--temperature", "0.7")
    assert (config.learning_rate, config.max_steps, config.temperature) == (0.5, 6, 0.7)
    assert (
        capsys.readouterr().err == f"note: {model}/defaults.yaml sets learning_rate=0.5, max_steps=5, temperature=0.9\n"
    )
    assert config.reward_funcs == ["exact_match", "math:gcd"]


def test_null_in_a_file_puts_the_default_back_and_a_number_needs_no_point(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("temperature: null\neval_steps: null\nreport_to: []\nlearning_rate: 1e-6\n")
    config = settings("--config", str(file))
    assert (config.temperature, config.eval_steps, config.report_to) == (0.6, None, [])
    assert config.learning_rate == 1e-6  # which YAML 1.1 takes for a text


def test_a_part_in_a_file_takes_a_further_option_of_a_flag_and_what_is_written_reads_back_the_same(tmp_path) -> None:
    (tmp_path / "run.yaml").write_text("estimator: {name: gradient, sigma: 0.5}\n")
    config = settings("--config", str(tmp_path / "run.yaml"), "--estimator.samples", "2", "--learning_rate", "1e-3")
    assert config.counterfactual().estimator == Gradient(sigma=0.5, samples=2)
    (tmp_path / "again.yaml").write_text(written := to_yaml(config, "by: a test"))
    assert written.startswith("# by: a test\n")
    assert settings("--config", str(tmp_path / "again.yaml")) == config


def test_every_setting_is_documented() -> None:
    texts = documented(TrainSettings)
    assert set(texts) == {field.name for field in fields(TrainConfig)}
    assert [name for name, text in texts.items() if not text.endswith((".", ".)", "`."))] == []


def test_help_is_a_screen_and_all_of_it_names_every_setting_with_its_choices_and_default(capsys) -> None:
    assert main(["--help"]) == 0
    short = capsys.readouterr().out
    assert "Completions per problem (G) [8]" in short
    assert len(short.splitlines()) < 45
    with pytest.raises(SystemExit) as ended:
        main(["--help-all"])
    every = unboxed(capsys.readouterr().out)
    assert ended.value.code == 0
    names = {field.name for field in fields(TrainConfig)} - {"credit_options"}
    assert [name for name in names if f" --{name} " not in every.replace(",", " ")] == []
    assert "--num_generations INT Completions per problem (G), the group that advantages compare. (default: 8)" in every


NO_TORCH = """
import contextlib, io, json, sys
from trainer.__main__ import main

ends = []
for argv in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = main(argv)
        except SystemExit as ended:
            code = ended.code
    ends.append([code, out.getvalue(), err.getvalue(), sorted({"torch", "transformers", "datasets"} & {*sys.modules})])
print(json.dumps(ends))
"""
BEFORE_TORCH = [
    (["--help"], 0, "usage: python -m trainer [--SETTING VALUE ...]"),
    (["--version"], 0, f"cfa_kernels {__version__}"),
    (["--config=cf", "--bogus"], 2, "--bogus: is no setting and no option of credit with a value"),
    (["--learning_rat", "1e-3"], 2, "learning_rat is no setting; did you mean learning_rate?"),
    (["--max_steps=ten"], 2, "--max_steps: invalid literal for int() with base 10: 'ten'"),
    (["--learning_rate=nan"], 2, "error: learning_rate must be in [1e-38, 1e38], got nan"),
    (["--reward_funcs", "own:f", "exact"], 2, "reward_funcs: 'exact' is neither one of exact_match, math_verify "),
    (["--config"], 2, "--config: expected one argument"),
    (["--config=nowhere.yaml"], 2, "--config nowhere.yaml: there is no such file; calculator, cf,"),
    (["--dataset=nowhere.jsonl"], 2, "dataset nowhere.jsonl: expected a .json, .jsonl or .parquet file that exists"),
    (["--model=./nowhere"], 2, "model ./nowhere: there is no such folder"),
]


def test_help_wrong_flags_and_missing_files_wait_for_no_import_of_torch() -> None:
    command, flags = [sys.executable, "-c", NO_TORCH], json.dumps([argv for argv, _, _ in BEFORE_TORCH])
    done = subprocess.run(command, cwd=REPOSITORY, input=flags, capture_output=True, text=True, check=True)
    ends = json.loads(done.stdout.splitlines()[-1])
    for (argv, code, said), (ended, out, err, imported) in zip(BEFORE_TORCH, ends, strict=True):
        assert (ended, imported) == (code, []), argv
        assert said in unboxed(err if code else out.splitlines()[0]), argv
        assert len(err.split()) < 90, argv  # not the usage of ninety settings


def test_every_option_of_credit_is_a_flag_and_none_is_taken_for_a_misspelt_setting():
    names = {entry.name for entry in fields(CounterfactualConfig)} | {path for path, _, _ in part_options()}
    for name in sorted(names - {entry.name for entry in fields(TrainSettings)}):
        assert parse([f"--{name}=x"], prog="cfa-train").credit_options == {name: "x"}, name


@pytest.mark.parametrize("flag", ["--open_spans={}", "--open_spans {}"])
def test_a_flag_of_credit_is_true_or_false_as_yaml_writes_it(flag):
    for word, value in {"true": True, "True": True, "false": False}.items():
        config = settings(*flag.format(word).split())
        assert config.credit_options == {"estimator": "masking", "open_spans": value}
        assert config.counterfactual().open_spans is value


def test_a_line_says_how_to_switch_credit_on_where_none_is_named(capsys) -> None:
    for flags in ((), ("--credit=none",), ("--estimator=masking",), ("--credit=cf", "--spans.max_spans=5")):
        config = TrainConfig(**vars(parse_checked(["--device=cpu", *flags], prog="cfa-train")))
        says = "note: no credit; --credit takes cf, entropy_80_20," in capsys.readouterr().err
        assert says == (config.credit_name == "none")


WRONG = [
    (["--loss_type", "gmpo"], "importance_sampling_level must be 'sequence' or 'sequence_token' with"),
    (["--score_centering", "--top_p=1"], "score_centering needs the ids of a nucleus: take a top_p below 1"),
    (
        ["--score_centering", "--top_p=0.9", "--importance_sampling_level=sequence_token"],
        "score_centering needs importance_sampling_level='token', no",
    ),
    (["--importance_sampling_level=sequence"], "importance_sampling_level=sequence sums the weights of tokens"),
    (["--loss_type", "bnpo"], "loss_type: bnpo divides by the tokens of a part that memory cuts"),
    (["--importance_sampling_mode=token_mask"], "importance_sampling_mode has no effect without"),
    (["--bogus", "3"], "unknown option 'bogus' of credit"),
    (["--credit", "cg"], "credit must be 'none' or one of cf, "),
    (["--stop", ""], "stop: an empty text would end every completion at once"),
    (["--reward_weights", "nan"], "reward_weights must be finite numbers, got [nan]"),
    ("credit_options: {estimator: masking}", "unknown option 'credit_options' of credit"),
    (["--num_generations=3"], "a multiple of num_generations, got 128 and 3"),
    (["--reward_funcs"], "reward_funcs must name at least one function"),
    (["--reward_weights", "1", "2"], "reward_weights: 2 weights for 1 reward_funcs"),
    (["--reward_funcs", "math_verify", "exact_match"], "reward_funcs: exact_match cannot read the rows of eval_reward"),
    (["--estimator=external"], "estimator='external': it needs importances that the caller passes in, which this"),
    (["--dtype=bfloat16", "--no_use_peft"], "dtype: bfloat16 without use_peft would train weights to which most"),
    (["--device=toaster"], "device must be auto, cpu or a GPU such as cuda:0, got 'toaster'"),
    (["--vllm_server_base_url=http://gpu:1"], "only rollout_engine=vllm reads them"),
    (["--rollout_engine=vllm", "--vllm_server_base_url=gpu:1"], "must begin with http:// or https://, got 'gpu:1'"),
    (["--estimator.merge_adapters=true"], "estimator.merge_adapters: there is no adapter to merge, as use_peft is"),
    (["--rollout_engine=vllm", "--temperature=3"], "temperature: a vLLM server takes at most 2, got 3.0"),
    (["--rollout_engine=vllm", "--vllm_weights=adapter"], "vllm_weights: adapter sends a LoRA, and use_peft is off"),
    ("learning_rats: 1e-3", "learning_rats is no setting; did you mean learning_rate?"),
    ("max_steps: 2.5", "max_steps must be an integer, at least 0, got 2.5"),
    ("reward_funcs: exact_match", "reward_funcs must be a list, got 'exact_match'"),
    ("- max_steps", "must hold settings as 'name: value', got list"),
]
"""Flags, or the text of a file of settings, and words of the message."""


def test_a_wrong_setting_ends_the_program_and_is_named(capsys, tmp_path) -> None:
    for given, said in WRONG:
        if isinstance(given, str):
            (tmp_path / "run.yaml").write_text(given)
            given = ["--config", str(tmp_path / "run.yaml")]
        assert said in message(capsys, *given), given
