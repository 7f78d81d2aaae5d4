"""The watchdog: what hangs is shown and ended, what takes long is not."""

import subprocess
import sys

from refusion_jax.distributed.watchdog import Watchdog


def test_a_process_that_hangs_shows_its_stacks_and_leaves_to_be_started_again():
    program = (
        "import time\nfrom refusion_jax.distributed.watchdog import Watchdog\ndog = Watchdog(0.003); dog.alive(7)\n"
    )
    program += "def stuck():\n    time.sleep(60)\nstuck()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 75
    assert "in stuck" in done.stderr
    assert "nothing has happened for 0.018 minutes after step 7" in done.stderr


class Clock:
    """A clock that the test moves on, and a watchdog with no thread of its own that goes by it."""

    def __init__(self, monkeypatch, minutes: float):
        self.now = 0.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr("threading.Thread.start", lambda self: None)
        self.dog, self._patch = Watchdog(minutes), monkeypatch.setattr

    def ends(self) -> bool:
        """Whether the watchdog ends the process when it looks now."""
        looks, ended = iter([False, True]), []
        self._patch(self.dog._closed, "wait", lambda seconds: next(looks))
        self._patch("os._exit", ended.append)
        self.dog._watch()
        return ended == [75]


def test_what_counts_as_a_hang_is_measured(monkeypatch):
    clock, limits = Clock(monkeypatch, 1.0), []
    for step, (seconds, is_slow) in enumerate([(1, False), *[(2, False)] * 32, (300, True), (30, False), (2, False)]):
        clock.now += seconds
        clock.dog.alive(step, is_slow)
        limits.append(clock.dog._seconds)
    assert limits == [360] * 31 + [60, 60] + [360, 300, 300]


def test_what_gives_no_sign_of_life_may_take_longer(monkeypatch):
    clock = Clock(monkeypatch, 1.0)
    with clock.dog.paused():
        clock.now += 1e6
        assert not clock.ends()
    clock.now += 360
    assert not clock.ends()
    clock.now += 1
    assert clock.ends()
