"""Hook of mkdocs: README.md becomes the first page, and files outside docs/ that a page links come with the site."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")


def on_files(files: Files, config: Any) -> Files:
    """Add README.md and what the pages link, and what those link in turn."""
    found = [ROOT / "README.md", *(Path(file.abs_src_path) for file in files.documentation_pages())]
    for file in found:  # which grows
        if files.get_file_from_path(_place(file)) is None:
            files.append(File.generated(config, _place(file), abs_src_path=str(file)))
        if file.suffix == ".md":
            found += [target for _, target in _links(file) if target not in found]
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Write the links of a page as they are between the site's files."""
    source = Path(page.file.abs_src_path)
    places = {link: os.path.relpath(_place(target), Path(_place(source)).parent) for link, target in _links(source)}
    markdown = re.sub(r"^```python requires=\S+$", "```python", markdown, flags=re.MULTILINE)  # what a test must import
    return _LINK.sub(lambda link: places.get(link[1], link[1]), markdown)


def _links(page: Path) -> Iterator[tuple[str, Path]]:
    """Find the links of a page to files that are there, as they are written and as they are."""
    for link in _LINK.findall(page.read_text(encoding="utf-8")):
        if (target := (page.parent / link).resolve()).is_file():
            yield link, target


def _place(file: Path) -> str:
    """Say where a file of the repository is in the site's sources."""
    path = file.relative_to(ROOT).as_posix()
    places = {"README.md": "index.md", "benchmarks/README.md": "benchmarks/folder.md"}  # benchmarks/ is benchmarks.md's
    return places.get(path, path.removeprefix("docs/"))
