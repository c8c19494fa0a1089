"""What a run refuses before the model is loaded, beside the catalogue: a place for which it has no right."""

import os

import pytest

from trainer.preflight import require_place

NOBODY = 65534


@pytest.fixture
def read_only(tmp_path):
    """A folder that everyone may read and nobody may write to, not even this process."""
    folder = tmp_path / "kept"
    folder.mkdir()
    folder.chmod(0o555)
    before = os.geteuid()
    if before == 0:
        for parent in (tmp_path, *tmp_path.parents):
            if not parent.stat().st_mode & 0o001:
                parent.chmod(0o711)  # to pass through
        os.seteuid(NOBODY)
    yield folder
    os.seteuid(before)
    folder.chmod(0o755)


@pytest.mark.parametrize(("name", "verb"), [(".", "written to"), ("run", "made"), ("runs/of/today", "made")])
def test_a_folder_that_is_read_only_is_no_place_for_a_run(read_only, name, verb) -> None:
    place = read_only / name
    said = rf"^output_dir: {place} cannot be {verb}: nothing can be written in {read_only} \(Permission denied\)$"
    with pytest.raises(PermissionError, match=said):
        require_place(place)


@pytest.mark.parametrize("name", [".", "run", "runs/of/today"])
def test_looking_for_a_place_leaves_nothing_behind(tmp_path, name) -> None:
    require_place(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
