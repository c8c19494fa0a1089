"""Settings of credit that ship, a YAML file each, by name; this imports no torch."""

from pathlib import Path

PRESETS = Path(__file__).parent
DEFAULT_PRESET = "prefix_gain_positive"
"""Name of the preset that trained best where most of a completion cannot matter. A pretrained model loses by it."""


def preset_names() -> list[str]:
    """List the names of the presets."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))
