"""Packaging: `pip install .` installs `cfa_kernels` and `trainer/`, called `cfa_trainer` there, `examples/` inside it.

Benchmarks and tests run from the checkout. Ranges stand here, exact pins in constraints.txt. The core is what kernels,
losses and scoring import.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

CORE = [
    "torch>=2.11",
    "triton>=3.6; platform_system == 'Linux'",
    "transformers>=5.5.3,<6",
    "numpy>=2.0",
    "rapidfuzz>=3",
]
TRL = ["trl>=1.0,<2", "peft>=0.18", "accelerate>=1.10", "datasets>=4.0"]
TRAINER = [
    "transformers>=5.17",
    "peft>=0.18",
    "accelerate>=1.10",
    "datasets>=4.0",
    "liger-kernel>=0.8",
    "tqdm>=4.67",
    "pyyaml>=6.0",
    "tyro>=1.0",
    "filelock>=3.15",
    "safetensors>=0.5",
    "pandas>=2.2",
]
MATH = ["math-verify[antlr4_13_2]>=0.9"]
TESTING = [
    *MATH,
    "matplotlib>=3.9",
    "trl>=1.16",
    "pytest>=8",
    "pytest-xdist>=3.7",
    "pytest-timeout>=2.3",
    "pytest-benchmark>=5.3",
    "hypothesis>=6.100",
    "setuptools>=77",
    "requests>=2.32",
    "selenium>=4.20",
]

ROOT = Path(__file__).parent
# A picture, or the link of a text: beside the package there are no files that they could lead to.
RELATIVE_LINK = r"!\[[^\]]*\]\((?!https?:)[^)]*\)|\[([^\]]*)\]\((?!https?:)[^)]*\)"
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "cfa_kernels/__init__.py").read_text("utf-8"), re.MULTILINE)

setup(
    name="cfa_kernels",
    version=VERSION[1],
    description="Counterfactual credit assignment for the reinforcement learning of language models",
    long_description=re.sub(RELATIVE_LINK, r"\1", (ROOT / "README.md").read_text("utf-8")),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    author="The maintainers of cfa_kernels",
    keywords="GRPO, DAPO, RLVR, credit assignment, Triton, language models",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["cfa_kernels", "cfa_kernels.*"]),
        *("cfa_trainer" + name.removeprefix("trainer") for name in find_packages(include=["trainer", "trainer.*"])),
        "cfa_trainer.examples",
        "cfa_trainer.examples.estimators",
    ],
    package_dir={"cfa_trainer": "trainer", "cfa_trainer.examples": "examples"},
    package_data={
        "cfa_kernels": ["py.typed", "__init__.pyi", "model/README.md", "credit/presets/*"],
        "cfa_trainer": ["configs/*", "embedded/assets/*", "report/assets/*"],
    },
    entry_points={
        "console_scripts": [
            "cfa-train = cfa_trainer.__main__:main",
            "cfa-analyze = cfa_trainer.analyze.__main__:main",
            "cfa-compare = cfa_trainer.analyze.__main__:main",
        ]
    },
    install_requires=CORE,
    extras_require={
        "trl": TRL,
        "verl": ["verl[verl-core]>=0.9.1"],
        "openrlhf": ["openrlhf>=0.11.2"],
        "trainer": TRAINER,
        "math": MATH,
        "vllm": [*TRAINER, "trl[vllm]>=1.16,<1.17", "requests>=2.32"],
        # aligntune, a contender of the benchmarks, pins an older trl: pip install --no-deps aligntune
        "bench": [*TRL, *TRAINER, *TESTING, "pytest-benchmark[histogram]>=5.3", "lm-eval>=0.4.9"],
        "test": [*TRL, *TRAINER, *TESTING],
        "docs": ["mkdocs-material>=9.7,<10"],
        "lint": ["ruff>=0.9", "mypy>=1.13", "types-PyYAML", "import-linter>=2.16"],
    },
)
