"""The embedded model, set up once for all tests of the trainer."""

import pytest

from tests.support.embedded import sample, settings
from tests.support.runs import child, flags, main, outcome
from tests.support.tiny import write_tiny
from trainer.run import set_up


@pytest.fixture(scope="session")
def trainer():
    """The embedded model, set up; tests that change it take `fresh`."""
    return set_up(settings())


@pytest.fixture
def fresh():
    """Sets a trainer of the test's own up, to change at will."""
    return lambda *argv: set_up(settings(*argv))


@pytest.fixture(scope="session")
def rollouts(trainer):
    """32 completions of 4 problems."""
    return sample(trainer, [0, 1, 2, 3])


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A folder with a tiny model and problems that it can be trained on in a moment."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def there(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def undisturbed(there):
    code, (ended, _, said) = child(main, flags(there / "model", there / "undisturbed"))
    assert (code, ended, said) == (0, 0, "")
    return outcome(there / "undisturbed")
