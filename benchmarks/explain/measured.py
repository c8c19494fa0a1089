"""What result files hold of a model's step on a GPU, beside what is predicted."""

from pathlib import Path
from typing import Any

from benchmarks.explain.table import CREDITS, ROLLOUTS, UPDATE
from benchmarks.harness.parts import read_results

OURS, WITH_SAMPLING = "ours counterfactual, one pass", "step with sampling,"


def find(folder: Path, model: str, gpu: str, trains: str) -> dict[str, str]:
    """Seconds by row of the table, each with the rows that were fed, from every result file of this model and GPU.

    Batches of other sizes stand there, too: how many rows they fed is said beside the figure.
    """
    found: dict[str, list[str]] = {}
    for file in sorted(folder.glob("*.json")):
        document = read_results(file)
        if not isinstance(document, dict) or "parts" not in document:
            continue  # evidence, not a run of `speed`
        device = document.get("environment", {}).get("device", {})
        if gpu.lower() not in device.get("name", "").lower():
            continue
        for figure, workload in _steps(document):
            if workload.get("model") == model and workload.get("trains") == trains:
                for row, seconds in _seconds(figure).items():
                    fed = f"{figure['rows_with_gradient']:,} + {figure['rows_without_gradient']:,} rows"
                    found.setdefault(row, []).append(f"{seconds * 1e3:,.0f} ({fed}, {file.stem})")
    return {row: "; ".join(texts) for row, texts in found.items()}


def _steps(document: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    part = document.get("parts", {}).get("step", {})
    figures = [figure for figure in part.get("figures", []) if figure["name"] == OURS]
    named = part.get("workloads", {})
    return [(figure, named.get(figure["group"].replace(WITH_SAMPLING, "step,"), {})) for figure in figures]


def _seconds(figure: dict[str, Any]) -> dict[str, float]:
    if "sampling_seconds" in figure:  # of a race that includes sampling
        return {ROLLOUTS: figure["sampling_seconds"]}
    return {UPDATE: figure["update_seconds"] + figure["credit_seconds"], CREDITS: figure["credit_seconds"]}
