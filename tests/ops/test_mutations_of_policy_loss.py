"""A sample of the mutants of `mutate_policy_loss.py`; run that file for all of them."""

import pytest

from tests.support import mutate_policy_loss as mutation

pytestmark = pytest.mark.slow

MUTANTS = mutation.mutants()
SAMPLE = [mutant for mutant in MUTANTS[7::43] if mutant.key not in mutation.EQUIVALENT]


@pytest.mark.parametrize("mutant", SAMPLE, ids=str)
def test_a_test_fails_when_one_term_changes(mutant):
    assert mutation.noticed(mutant)


def test_unchanged_code_passes_the_tests_that_mutants_fail():
    module, functions = next(iter(mutation.TARGETS.items()))
    source = (mutation.OPS / f"{module}.py").read_text()
    assert not mutation.noticed(mutation.Mutant(module, functions[0], 1, "", "", source), mutation.one_of_each())


def test_there_are_mutants_of_every_function_and_each_changes_its_source():
    assert {mutant.function for mutant in MUTANTS} == {name for names in mutation.TARGETS.values() for name in names}
    for module in mutation.TARGETS:
        sources = [mutant.source for mutant in MUTANTS if mutant.module == module]
        assert (mutation.OPS / f"{module}.py").read_text() not in sources


def test_known_equivalents_are_still_mutants():
    assert set(mutation.EQUIVALENT) <= {mutant.key for mutant in MUTANTS}
