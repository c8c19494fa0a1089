"""Configurations of credit that ship, a YAML file each, by name; this imports no torch."""

from pathlib import Path

PRESETS = Path(__file__).parent
NONE = "none"
"""Name of no credit, which is the default everywhere."""


def preset_names() -> list[str]:
    """List the names of the presets."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))
