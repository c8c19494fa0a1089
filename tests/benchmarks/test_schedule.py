"""Work on groups beside the decoding of others: what two jobs share, and what a schedule can gain at most."""

import pytest

from benchmarks.explain.batch import described
from benchmarks.explain.rates import GPUS, HOST
from benchmarks.explain.schedule import AFTER, ALL, SCHEDULES, Parts, Work, bound, overlapped, real_lengths, seconds
from benchmarks.explain.step import FORWARD, Training, configuration, policy_on_meta

TOKEN = Work(alone=1.0, products=0.1, bandwidth=0.9)
BESIDE = [name for name in SCHEDULES if name != AFTER]


def step(ends, *, host=0.0, waiting=0):
    """Eight groups whose work multiplies while decoding reads memory."""
    group = {section: Work(alone=5.0, products=4.0, bandwidth=0.5) for section in ALL}
    return Parts(0.0, [TOKEN] * ends[-1], ends, waiting, group, dict.fromkeys(ALL, host), 4.0)


def test_jobs_that_need_other_things_run_at_once_and_those_that_need_the_same_one_after_the_other():
    multiplies, reads = Work(4.0, products=3.6, bandwidth=0.4), Work(4.0, bandwidth=4.0)
    ends, tokens, nothing = [2, 6], [TOKEN] * 6, Work(1e-9)
    assert overlapped(ends, tokens, 0.0, [multiplies, nothing]) == pytest.approx(6.0)
    # 2 tokens alone; then memory is asked for 1.9 times over until the job is done, and the rest alone.
    assert overlapped(ends, tokens, 0.0, [reads, nothing]) == pytest.approx(2 + 4 * 1.9)


def test_a_job_that_goes_on_when_all_is_decoded_takes_its_own_time():
    long = Work(10.0, products=1.0)
    assert overlapped([2, 6], [TOKEN] * 6, 0.0, [long, long]) == pytest.approx(6 + 6 + 10)


def test_tokens_wait_for_blocks_only_while_a_job_runs():
    job = Work(4.0, products=0.4)
    # Beside the job a token takes 2 seconds, so 2 of the 4 that are left are decoded in its time.
    assert overlapped([2, 6], [TOKEN] * 6, 1.0, [job, Work(1e-9)]) == pytest.approx(2 + 4 + 2)


@pytest.mark.parametrize("schedule", BESIDE)
def test_where_all_groups_end_together_nothing_is_gained(schedule):
    together = step([100] * 8)
    assert seconds(together, schedule) >= seconds(together, AFTER) - 1e-9


@pytest.mark.parametrize("host", [0.0, 30.0])
@pytest.mark.parametrize("schedule", BESIDE)
def test_no_schedule_is_shorter_than_its_bound(schedule, host):
    spread = step(list(range(30, 110, 10)), host=host, waiting=10_000)
    assert bound(spread, schedule) <= seconds(spread, schedule)


def test_work_on_groups_that_end_early_hides_behind_the_decoding_of_others():
    spread = step(list(range(30, 110, 10)))
    after, hidden = seconds(spread, AFTER), seconds(spread, "credit and update while another GPU decodes")
    assert after == pytest.approx(100 + 8 * 20)
    assert hidden == pytest.approx(30 + 8 * 20)
    # The forward is fed twice where only credit comes early: it hides, but costs as much again later.
    early = seconds(spread, "credit while another GPU decodes")
    assert early == pytest.approx(30 + 8 * 10 + 8 * 15)


def test_real_lengths_have_the_mean_that_is_asked_for_and_no_more_than_the_longest():
    lengths = real_lengths(16, 8, 220, 400)
    assert [len(row) for row in lengths] == [8] * 16
    flat = [length for row in lengths for length in row]
    assert 150 < sum(flat) / len(flat) < 260
    assert max(flat) <= 400
    assert lengths == real_lengths(16, 8, 220, 400)


def test_what_has_ended_is_not_decoded_on():
    model = policy_on_meta(configuration("qwen3-tiny"), Training(4))

    def shape(problems, group, longest):
        return described(
            problems, group, prompt=20, completion=40, spans=2, mixed=1.0, longest=longest, vocabulary=1000
        )

    found = Parts.of(model, shape, [[40, 40], [60, 80]], GPUS["H200"], padded=False)
    assert found.ends == [40, 80]
    assert len(found.tokens) == 80
    assert all(token.alone > token.host == HOST.replay for token in found.tokens)
    read = [token.bandwidth for token in found.tokens]
    assert read[0] < read[39]  # one key and one value more for each token
    assert read[40] < read[39]
    assert read[60] < read[59]
    assert found.group[FORWARD].products > 0
