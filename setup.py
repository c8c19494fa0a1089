"""Packaging: `pip install .` installs `cfa_kernels` and `trainer`. Exact pins are in constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

CONSOLE = ["rich>=13.9", "matplotlib>=3.9", "pyyaml>=6.0"]
TEST = ["pytest>=8", "pytest-benchmark>=5", "pytest-xdist>=3.6", "hypothesis>=6.100", "trl>=1.16,<1.17"]
LINT = ["ruff>=0.9", "mypy>=1.13", "types-PyYAML"]
BENCH = ["captum>=0.8", "lm-eval>=0.4.9", "aligntune>=0.1.28"]

setup(
    name="cfa_kernels",
    version="0.1.0",
    description="Counterfactual credit assignment for language-model reinforcement learning, nearly free",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["cfa_kernels", "cfa_kernels.*", "trainer", "trainer.*"]),
    package_data={"cfa_kernels": ["py.typed"], "trainer": ["assets/**/*", "presets/*.yaml"]},
    install_requires=[
        "torch>=2.10",
        "triton>=3.6,<3.8; platform_system == 'Linux'",
        "transformers>=5.17,<6",
        "peft>=0.18",
        "datasets>=4.0",
        "liger-kernel>=0.8",
        *CONSOLE,
    ],
    entry_points={"verl.plugins": ["cfa_kernels = cfa_kernels.integrations.verl"]},
    extras_require={"test": TEST, "lint": LINT, "bench": BENCH},
)
