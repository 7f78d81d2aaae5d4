"""The watchdog: what hangs is shown and ended, what takes long is not."""

import subprocess
import sys

from refusion_jax.distributed.watchdog import Watchdog


def test_a_process_that_hangs_shows_its_stacks_and_leaves_to_be_started_again():
    program = (
        "import time\nfrom refusion_jax.distributed.watchdog import Watchdog\ndog = Watchdog(0.001); dog.alive(7)\n"
    )
    program += "def stuck():\n    time.sleep(60)\nstuck()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 75
    assert "in stuck" in done.stderr
    assert "nothing has happened for 0.006 minutes after step 7" in done.stderr


def test_what_counts_as_a_hang_is_measured(monkeypatch):
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr("threading.Thread.start", lambda self: None)
    dog, limits = Watchdog(1.0), []
    for step, (seconds, is_slow) in enumerate([(1, False), *[(2, False)] * 32, (300, True), (30, False), (2, False)]):
        now += seconds
        dog.alive(step, is_slow)
        limits.append(dog._seconds)
    assert limits == [360] * 31 + [60, 60] + [360, 300, 300]


def test_what_gives_no_sign_of_life_may_take_longer():
    program = "import time; from refusion_jax.distributed.watchdog import Watchdog; dog = Watchdog(0.005)\n"
    program += "with dog.paused():\n    time.sleep(2)\nprint('done')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "done\n")
