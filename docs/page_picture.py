"""Draw the picture of a run's page by Chromium, `python -m docs.page_picture RUN`: docs/page.png."""

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

PICTURE = Path(__file__).with_name("page.png")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--hide-scrollbars",
    "--window-size=1120,1400",
)


def draw(page: Path, path: Path) -> None:
    """Write what a window shows of a page, in few colours."""
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "page.png"
        profile = f"--user-data-dir={folder}/profile"
        subprocess.run(["chromium", *_FLAGS, profile, f"--screenshot={raw}", page.resolve().as_uri()], check=True)
        Image.open(raw).convert("RGB").quantize(128).save(path, optimize=True)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) / "report.html", PICTURE)
