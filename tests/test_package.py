"""What the package promises as a whole: public names, what an import brings, sizes, what is shipped."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import cfa_kernels
from tests.conftest import REPOSITORY

PACKAGE = REPOSITORY / "cfa_kernels"


def run(code: str, **environment: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **environment}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


WITHOUT_TRANSFORMERS = """
import sys
import cfa_kernels
print(sorted({"torch", "triton", "transformers", "numpy"} & sys.modules.keys()))

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("transformers", "peft", "trl", "datasets"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Absent())
import torch
from cfa_kernels import Span, linear_logprob, linear_policy_loss, logits_policy_loss, policy_loss, span_weights

torch.manual_seed(0)
hidden, head = torch.randn(2, 3, 4), torch.randn(7, 4)
targets, mask = torch.randint(7, (2, 3)), torch.ones(2, 3)
logits = hidden @ head.T
logprobs = linear_logprob(hidden.view(6, 4), head, targets.view(6)).view(2, 3)
weights = span_weights(torch.tensor([3.0, 0.0]), [Span(0, 1), Span(1, 2)], None, 3).expand(2, 3)
rest = (logprobs - 0.1, torch.tensor([1.0, -1.0]), mask)
losses = [
    policy_loss(logprobs, *rest, weights=weights)[0],
    logits_policy_loss(logits, targets, *rest, weights=weights)[0],
    linear_policy_loss(hidden, head, targets, *rest, weights=weights)[0],
]
torch.testing.assert_close(losses[1:], losses[:1] * 2)
print(weights[0].tolist())
try:
    cfa_kernels.score_counterfactuals
except ImportError as error:
    print(error)
"""


def test_losses_and_weights_do_without_transformers_and_the_import_brings_nothing():
    modules, weights, refused = run(WITHOUT_TRANSFORMERS).splitlines()
    assert modules == "[]"
    assert weights == "[4.0, 0.5, 1.0]"
    assert refused == "transformers is blocked"


def test_every_public_name_is_declared_as_it_is_imported_and_is_there():
    declared = [node for node in ast.walk(ast.parse((PACKAGE / "__init__.pyi").read_text())) if hasattr(node, "asname")]
    assert sorted(one.name for one in declared) == cfa_kernels.__all__
    assert all(one.asname == one.name for one in declared)
    for name in cfa_kernels.__all__:
        assert getattr(cfa_kernels, name).__name__ == name
    assert set(cfa_kernels.__all__) <= set(dir(cfa_kernels))
    with pytest.raises(AttributeError, match="no attribute 'policy_los'"):
        cfa_kernels.policy_los  # noqa: B018


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_no_file_has_more_than_500_lines():
    assert not {path.name for path in sources() if len(path.read_text().splitlines()) > 500}


def test_no_test_imports_another():
    """What two of them need is in tests/support. Programs in strings, which tests run, are read as well."""
    lines = [line for path in (REPOSITORY / "tests").rglob("*.py") for line in path.read_text().splitlines()]
    assert not [line for line in lines if re.match(r"\s*(from|import) .*\btest_\w+", line)]


@pytest.mark.slow
def test_the_wheel_holds_the_library_and_the_program_and_the_sdist_the_checkout(tmp_path):
    """The sdist is made of a copy of the checkout, the wheel of what is in that sdist."""
    ignored = shutil.ignore_patterns(".*", "results", "__pycache__", "*.egg-info", "build", "dist", "runs")
    source = Path(shutil.copytree(REPOSITORY, tmp_path / "source", ignore=ignored))

    def build(kind: str, source: Path) -> Path:
        code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(tmp_path)!r}))"
        done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return tmp_path / done.stdout.splitlines()[-1]

    with tarfile.open(build("sdist", source)) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    with zipfile.ZipFile(build("wheel", unpacked)) as archive:
        files, wheel = set(archive.namelist()), archive.infolist()
        archive.extractall(tmp_path / "installed")
    assert {name.partition("/")[0] for name in files if ".dist-info/" not in name} == {"cfa_kernels", "cfa_trainer"}
    assert files >= {path.relative_to(REPOSITORY).as_posix() for path in sources()}
    program = [path for path in (REPOSITORY / "trainer").rglob("*.*") if path.suffix != ".pyc"]
    assert files >= {f"cfa_{path.relative_to(REPOSITORY).as_posix()}" for path in program}
    help_of = "from cfa_trainer.__main__ import main; main(['--help'])"
    assert "calculator, cf, ibpo, oar_g, oar_p" in run(help_of, PYTHONPATH=str(tmp_path / "installed"))
    # Names of examples are those of the checkout, also next to a user's own package of that name.
    assert {path.name for path in (REPOSITORY / "examples").glob("*.py")} <= {Path(name).name for name in files}
    (tmp_path / "user" / "examples").mkdir(parents=True)
    (tmp_path / "user" / "examples" / "mine.py").write_text("")
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "examples.py").write_text("")
    # As setuptools' finder of a package that is installed editable.
    own = "import types, importlib.machinery as m; own = m.ModuleSpec('examples', None, is_package=True)"
    own += f"; own.submodule_search_locations += [{str(tmp_path / 'user' / 'examples')!r}]"
    own += "; find_spec = lambda name, *_: own if name == 'examples' else None"
    editable = f"; {own}; sys.meta_path.append(types.SimpleNamespace(find_spec=find_spec))"
    for folder in ("user", "script", "installed", "editable"):
        (tmp_path / folder).mkdir(exist_ok=True)
        add = f"import os, sys; os.chdir({str(tmp_path / folder)!r}); from cfa_trainer import __main__ as program"
        add += editable * (folder == "editable")
        code = f"{add}; program.add_examples(); assert 'examples' not in sys.modules"
        code += "; import examples.ibpo, examples.estimators.resampling"
        code += "; import examples.mine" * (folder in ("user", "editable"))
        where = run(f"{code}; print(examples.ibpo.__file__)", PYTHONPATH=str(tmp_path / "installed"))
        assert where.startswith(str(tmp_path / "installed" / "cfa_trainer" / "examples"))
    assert files >= {"cfa_kernels/py.typed", "cfa_kernels/model/README.md"}
    assert inside >= {"setup.py", "pyproject.toml", "constraints.txt", "Makefile", "LICENSE", "tests/conftest.py"}
    others = (each for each in wheel if not each.filename.endswith(".safetensors"))
    assert sum(each.compress_size for each in others) < 1e6
    (metadata,) = (tmp_path / "installed").glob("*.dist-info/METADATA")
    assert not re.search(r"\]\((?!https?:)", metadata.read_text("utf-8"))  # a link that leads nowhere
    data = [path for path in (REPOSITORY / "trainer").rglob("*.*") if path.suffix in (".safetensors", ".yaml")]
    assert len(data) > 1
    assert inside >= {path.relative_to(REPOSITORY).as_posix() for path in data}
