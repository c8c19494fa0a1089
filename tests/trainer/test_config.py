"""Settings: where they come from, which win, and what is said about a wrong one."""

import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from typing import get_args

import pytest

from cfa_kernels import AnswerRules, CounterfactualConfig, __version__
from cfa_kernels.credit.config import SpanRules, flat_options
from cfa_kernels.credit.presets import DEFAULT_PRESET
from cfa_kernels.credit.weights import Range
from cfa_kernels.estimators.masking import Masking
from cfa_kernels.loss.token_loss import CORRECTIONS
from cfa_kernels.loss.types import LEVELS, LOSS_TYPES
from tests.conftest import REPOSITORY
from tests.support.runs import config as settings
from trainer.__main__ import main
from trainer.cli import documented, of_rank, to_yaml
from trainer.config import TrainConfig
from trainer.rewards.built_in import BUILT_IN
from trainer.settings import CREDIT_OPTIONS, Correction, DataConfig, Level, LossType, TrainSettings


def unboxed(text: str) -> str:
    """The words of a message, without the frame and the line breaks of tyro's."""
    return " ".join(re.sub("[─│╭╮╰╯]|-{4,}", " ", text).split())


def message(capsys, *argv: str) -> str:
    """The words that the program ends with over these arguments."""
    with pytest.raises(SystemExit) as ended:
        settings(*argv)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    return unboxed(said.err)


def test_the_paper_run_is_one_line_and_has_the_paper_settings() -> None:
    config = settings("--config", "cf", "--model", "Qwen/Qwen3-1.7B", "--dataset", "openai/gsm8k")
    expected = {
        "credit": "counterfactual", "loss_type": "dapo", "num_generations": 8, "use_peft": True, "lora_r": 32,
        "learning_rate": 2.5e-5, "generation_batch_size": 64,
        "max_steps": 500, "temperature": 0.6, "top_p": 0.95,
        "epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0, "reward_funcs": ["exact_match"],
    }  # fmt: skip
    assert {name: getattr(config, name) for name in expected} == expected
    credit = config.counterfactual()
    assert (credit.estimator, credit.weights, credit.spans.max_spans) == (Masking(), Range(0.5, 4.0, 1.5, 0.0), 10)


@pytest.mark.parametrize(
    "weighing",
    [[], ["--credit=uniform", "--compare_and_correct=0.3"], ["--credit=uniform", "--importance_sampling_clip_max=3"]],
)
def test_weights_of_tokens_are_refused_where_a_completion_has_one_ratio(capsys, weighing) -> None:
    level = "--importance_sampling_level=sequence"
    said = message(capsys, level, *weighing)
    assert re.search(
        r"importance_sampling_level must be token or sequence_token with (credit=counter|compare_and|importance_s)",
        said,
    )
    assert settings(level, *weighing, "--loss_type=cispo").loss_type == "cispo"
    assert settings(level, "--credit=uniform").importance_sampling_level == "sequence"


def test_the_embedded_model_brings_settings_that_suit_it() -> None:
    config = settings()
    assert (config.model, config.dataset, config.use_peft, config.instruction) == ("embedded", "generated", False, "")
    assert config.credit == "counterfactual"


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


@pytest.mark.parametrize("name", ["oar_p", "oar_g"])
def test_a_papers_run_is_that_of_a_model_without_settings_and_a_folder_that_brings_some_keeps_them(tmp_path, name):
    run = {"learning_rate": 1e-6, "generation_batch_size": 64, "temperature": 1.0, "top_p": 1.0, "use_peft": False}
    run |= {"max_completion_length": 1024, "num_generations": 8}
    config = settings("--config", name, "--model", "Qwen/Qwen2.5-7B")
    assert {entry: getattr(config, entry) for entry in run} == run
    embedded, flags = settings(), ("--config", name, "--learning_rate=0.5")
    same = {entry.name: getattr(embedded, entry.name) for entry in fields(config)}
    same |= {entry: getattr(config, entry) for entry in ("credit", "estimator", "credit_options")}
    assert same["learning_rate"] != 1e-6
    assert settings("--config", name) == TrainConfig(**same)
    assert settings(*flags) == TrainConfig(**same | {"learning_rate": 0.5})
    mine = tmp_path / "mine.yaml"  # of one's own: it wins over the folder
    mine.write_text("learning_rate: 1.0e-6\n")
    assert settings("--config", str(mine)) == TrainConfig(**vars(embedded) | {"learning_rate": 1e-6})


def test_null_in_a_file_puts_the_default_back_and_a_number_needs_no_point(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("temperature: null\neval_steps: null\nreport_to: []\nlearning_rate: 1e-6\n")
    config = settings("--config", str(file))
    assert (config.temperature, config.eval_steps, config.report_to) == (0.6, None, [])
    assert config.learning_rate == 1e-6  # which YAML 1.1 takes for a text


def test_settings_written_to_a_file_read_back_the_same(tmp_path) -> None:
    config = settings("--credit", "random", "--learning_rate", "1e-3", "--instruction", "", "--no_use_peft")
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config, "by: a command"))
    assert settings("--config", str(file)) == config
    assert file.read_text().startswith("# by: a command\n")


def test_every_setting_is_documented() -> None:
    texts = documented(DataConfig) | documented(TrainSettings)
    assert set(texts) == {field.name for field in fields(TrainConfig)}
    assert [name for name, text in texts.items() if not text.endswith((".", ".)", "`."))] == []


def test_help_is_a_screen_and_all_of_it_names_every_setting_with_its_choices_and_default(capsys) -> None:
    assert main(["--help"]) == 0
    short = capsys.readouterr().out
    assert "--num_generations          Completions per problem (G)" in short
    assert len(short.splitlines()) < 45
    with pytest.raises(SystemExit) as ended:
        main(["--help-all"])
    every = unboxed(capsys.readouterr().out)
    assert ended.value.code == 0
    assert [field.name for field in fields(TrainConfig) if f" --{field.name} " not in every.replace(",", " ")] == []
    assert "--num_generations INT Completions per problem (G), the group that advantages compare. (default: 8)" in every
    assert "--importance_sampling_mode {token_truncate,token_mask,sequence_truncate" in every


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
    (["--help-all"], 0, "usage: python -m trainer [-h] [OPTIONS]"),
    (["--version"], 0, f"cfa_kernels {__version__}"),
    (["--bogus", "3"], 2, "Unrecognized options: --bogus, 3"),
    (["--config=cf", "--weights=top", "--bogus"], 2, "Unrecognized options: --bogus"),
    (["--learning_rat", "1e-3"], 2, "--learning_rat, 1e-3 Perhaps you meant: --learning_rate FLOAT"),
    (["--loss_type", "bnpo"], 2, "invalid choice 'bnpo' for argument '--loss_type'"),
    (["--max_steps=ten"], 2, "--max_steps: invalid literal for int() with base 10: 'ten'"),
    (["--max_steps=0"], 2, "error: max_steps must be an integer, at least 1, got 0"),
    (["--epsilon=-0.2"], 2, "error: epsilon must be finite and at least 0, got -0.2"),
    (["--learning_rate=nan"], 2, "error: learning_rate must be in [1e-38, 1e38], got nan"),
    (["--top_p=0"], 2, "error: top_p must be in (0, 1], got 0.0"),
    (["--reward_funcs", "own:f", "exact"], 2, "reward_funcs: 'exact' is neither one of exact_match, math_verify, "),
    (["--config"], 2, "--config: expected one argument"),
    (["--config=nowhere.yaml"], 2, "--config nowhere.yaml: there is no such file; the names that ship are calc"),
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


def test_names_that_are_written_without_torch_are_the_librarys() -> None:
    assert get_args(LossType) == tuple(name for name in LOSS_TYPES if name != "bnpo"), "name it in trainer/settings.py"
    assert (get_args(Level), get_args(Correction)) == (LEVELS, CORRECTIONS)
    whole = {"weights", "units", "completions", "normalize", "open_spans"}
    assert {*CREDIT_OPTIONS} == {name for name, _, _ in flat_options()} | whole, "name it in trainer/settings.py"
    assert len({*CREDIT_OPTIONS}) == len(CREDIT_OPTIONS)
    assert BUILT_IN["exact_match"].options == tuple(entry.name for entry in fields(AnswerRules))


@pytest.mark.parametrize("flag", ["--open_spans={}", "--credit_options open_spans {}"])
def test_a_flag_of_credit_is_true_or_false_as_yaml_writes_it(flag):
    for word, value in {"true": True, "True": True, "false": False}.items():
        config = settings(*flag.format(word).split())
        assert config.credit_options == {"open_spans": value}
        assert config.counterfactual().open_spans is value


def test_a_flag_that_changes_the_rule_of_a_preset_drops_the_options_of_the_presets_own_and_says_so(capsys) -> None:
    for flags in (["--weights=top"], ["--credit_options", "weights", "top"]):
        config = settings("--config=cf", *flags)
        others = {"selection": "first", "lead_in": "statement"}  # the preset's, which are read under any rule
        assert config.counterfactual() == CounterfactualConfig(weights="top", **others)
        dropped = "w_min=0.5, w_max=4.0, w_answer=1.5, min_spread=0.0"
        assert f"note: --config cf without {dropped}" in capsys.readouterr().err
    assert settings("--config=cf", "--estimator=entropy_shaping").counterfactual().weights is None
    capsys.readouterr()
    assert "w_max is not read" in message(capsys, "--weights=top", "--w_max=3")  # not a preset's


def test_credit_is_the_default_preset_unless_one_is_named_and_a_line_says_so(capsys) -> None:
    default = CounterfactualConfig.preset(DEFAULT_PRESET)
    for flags, expected in {
        (): default,
        ("--max_spans=5",): replace(default, spans=SpanRules(max_spans=5)),
        ("--config=cf",): CounterfactualConfig.preset("cf"),
        ("--estimator=masking",): CounterfactualConfig(),
        ("--credit=uniform",): replace(default, control="off"),
    }.items():
        config = TrainConfig(**vars(of_rank(["--device=cpu", *flags], prog="cfa-train")))
        assert config.counterfactual() == expected
        says = (
            f"note: credit by {DEFAULT_PRESET}, the default preset; --config also takes cf," in capsys.readouterr().err
        )
        assert says == (flags in ((), ("--max_spans=5",)))


def test_the_smaller_budget_of_run_and_credit_options_limits_credit() -> None:
    for of_run, options, expected in ((None, {"token_budget": 7}, 7), (9, {}, 9), (9, {"token_budget": 7}, 7)):
        config = TrainConfig(device="cpu", token_budget=of_run, credit_options=options)
        assert config.counterfactual().token_budget == expected


def test_an_estimator_of_ones_own_is_named_by_its_module_with_options_of_its_own(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom cfa_kernels import Estimator\n\n"
        "@dataclass(frozen=True)\nclass Late(Estimator):\n    name, power = 'late', 1.0\n    power: float = 1.0\n\n"
        "def flat(importances, units, answer, length): ...\nnumber = 1\n"
    )
    credit = settings(
        "--estimator=mine:Late", "--credit_options", "power", "2.0", "--weights=mine:flat"
    ).counterfactual()
    assert (credit.estimator.name, credit.estimator.power, credit.weights.name) == ("late", 2.0, "flat")
    assert CounterfactualConfig.from_flat({"estimator": "mine:Late"}).estimator.power == 1.0
    for name, said in {"mine:Lat": "cannot import 'mine:Lat': Attr", "mine:number": "'mine:number' is a int"}.items():
        assert f"estimator: {said}" in message(capsys, f"--estimator={name}")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--loss_type", "gmpo"], "importance_sampling_level must be 'sequence' or 'sequence_token' with"),
        (
            ["--loss_type=vespo", "--importance_sampling_clip_max=3", "--importance_sampling_mode=sequence_mask"],
            "sampling_mode='sequence_mask' corrects a row, and loss_type='vespo' weighs it by",
        ),
        (
            ["--score_centering", "--top_p=1"],
            "score_centering: needs the ids of a nucleus and their log-probs, and top_p=1 has no nucleus",
        ),
        (["--rollout_engine=vllm", "--temperature=3"], "temperature: a vLLM server takes at most 2, got 3.0"),
        (["--vllm_weights=file"], "vllm_weights: only rollout_engine=vllm reads them"),
        (
            ["--rollout_engine=vllm", "--vllm_weights=adapter"],
            "vllm_weights: adapter sends a LoRA, and use_peft is off",
        ),
        (
            ["--score_centering", "--top_p=0.9", "--importance_sampling_level=sequence_token"],
            "score_centering reads each token's ratio by itself: it needs importance_sampling_level='token', no",
        ),
        (["--num_generations=3"], "a multiple of num_generations, got 128 and 3"),
        (["--num_generations=1"], "num_generations must be at least 2 for a group to compare, got 1"),
        (["--reward_funcs"], "reward_funcs must name at least one function"),
        (["--merge_adapters=true"], "merge_adapters: use_peft is off, so there is no adapter to merge; omit one of"),
        (["--estimator=external"], "estimator='external': it needs importances that the caller passes in, which this"),
        (["--estimator=progress"], "estimator='progress': it needs log-probs of sampled tokens under the policy and"),
        (
            ["--credit_options", "target", "gold"],
            "target='gold': it needs gold answers that the caller passes in, which this trainer does",
        ),
        (["--dtype=bfloat16", "--no_use_peft"], "dtype: bfloat16 without use_peft would train weights to which most"),
        (["--device=toaster"], "device must be auto, cpu or a GPU such as cuda:0, got 'toaster'"),
        (["--vllm_server_base_url=http://gpu:1"], "only rollout_engine=vllm reads them"),
        (["--rollout_engine=vllm", "--vllm_server_base_url=gpu:1"], "vllm_server_base_url must begin with http://"),
    ],
)
def test_a_wrong_setting_ends_the_program_and_is_named(capsys, argv, said) -> None:
    assert said in message(capsys, *argv)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learning_rats: 1e-3", "unknown setting 'learning_rats'"),
        ("max_steps: 2.5", "max_steps must be an integer, at least 1, got 2.5"),
        ("reward_funcs: exact_match", "reward_funcs must be a list, got 'exact_match'"),
        (
            "credit: reversed",
            "credit must be one of 'counterfactual', 'inverted', 'permuted', 'random', 'uniform', got",
        ),
        ("- max_steps", "must hold settings as 'name: value', got list"),
    ],
)
def test_a_wrong_setting_in_a_file_is_named(capsys, tmp_path, text, said) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert said in message(capsys, "--config", str(file))
