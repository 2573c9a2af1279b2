"""With a clock of our own: no test looks at how long something really took."""

import pytest

from gear_jax.bench.gpu import clock


class Clock:
    """Stands still, but for what the calls add."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def takes(self, seconds):
        def call(*_):
            self.now += seconds

        return call


@pytest.fixture
def ticking(monkeypatch):
    found = Clock()
    monkeypatch.setattr(clock.time, "perf_counter", found.perf_counter)
    return found


def test_calls_in_flight_share_one_wait(ticking):
    waited = []

    def wait(result):
        waited.append(result)
        ticking.now += 1.0

    def call(i):
        ticking.now += 0.5
        return i

    assert clock.in_flight(call, wait, rounds=3, seconds=15.0) == pytest.approx((10 * 0.5 + 1.0) / 10)
    assert waited[-3:] == [9, 9, 9]  # one wait a round, for the last of ten calls


def test_at_least_three_calls_are_in_flight(ticking):
    calls = []
    clock.in_flight(lambda i: calls.append(i), ticking.takes(100.0), rounds=1, seconds=0.0)
    assert calls[-3:] == [0, 1, 2]


def test_each_call_has_two_times(ticking):
    handed, done = clock.each(ticking.takes(1.0), ticking.takes(2.0), 4)
    assert handed == [1.0] * 4 and done == [3.0] * 4


def test_what_two_programs_share_cancels_out(ticking):
    seconds = clock.between(ticking.takes(5.0 + 1.0), ticking.takes(5.0 + 4.0), 3, rounds=3, seconds=0.0)
    assert seconds == pytest.approx(1.0)


def test_noise_above_the_work_gives_too_much_rather_than_too_little(ticking):
    assert clock.between(ticking.takes(6.0), ticking.takes(4.0), 3, rounds=3, seconds=0.0) == pytest.approx(1.0)


def test_short_programs_are_repeated_more_often(ticking):
    runs = []

    def short():
        runs.append(0)
        ticking.now += 0.001

    clock.between(short, ticking.takes(0.009), 1, rounds=3, seconds=0.2)
    assert 20 <= len(runs) <= 30


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (50, 6.0), (99, 10.0), (100, 10.0)])
def test_percentiles(percent, value):
    assert clock.percentile([float(x) for x in (10, 9, 8, 7, 6, 5, 4, 3, 2, 1)], percent) == value
