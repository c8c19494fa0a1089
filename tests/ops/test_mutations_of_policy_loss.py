"""A sample of the mutants of `mutate_policy_loss.py`; run that file for all of them."""

import pytest

from tests.support import mutate_policy_loss as mutation

pytestmark = pytest.mark.slow

MUTANTS = mutation.mutants()


@pytest.mark.traced  # the tests that are run on mutants bring their own stand-in for a GPU
def test_a_test_fails_when_one_term_changes(capsys):
    """Unchanged code passes first: the program says so and ends with 2 if it does not."""
    ended = mutation.main(["--every", "43"])
    told = capsys.readouterr().out
    assert ended == 0, told
    assert told.splitlines()[-1].startswith(f"{-(-len(MUTANTS) // 43)} mutants, ")


def test_there_are_mutants_of_every_function_and_each_changes_its_source():
    assert {mutant.function for mutant in MUTANTS} == {name for names in mutation.TARGETS.values() for name in names}
    for module in mutation.TARGETS:
        sources = [mutant.source for mutant in MUTANTS if mutant.module == module]
        assert (mutation.OPS / f"{module}.py").read_text() not in sources


def test_known_equivalents_are_still_mutants():
    assert set(mutation.EQUIVALENT) <= {mutant.key for mutant in MUTANTS}
