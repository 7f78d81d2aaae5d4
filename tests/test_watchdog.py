"""The watchdog: what hangs is shown and ended, what takes long is not."""

import subprocess
import sys


def test_a_process_that_hangs_shows_its_stacks_and_leaves_to_be_started_again():
    program = (
        "import time\nfrom refusion_jax.distributed.watchdog import Watchdog\ndog = Watchdog(0.005); dog.alive(7)\n"
    )
    program += "def stuck():\n    time.sleep(60)\nstuck()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 75
    assert "in stuck" in done.stderr
    assert "nothing has happened for 0.005 minutes after step 7" in done.stderr


def test_what_gives_no_sign_of_life_may_take_longer():
    program = "import time; from refusion_jax.distributed.watchdog import Watchdog; dog = Watchdog(0.005)\n"
    program += "with dog.paused():\n    time.sleep(2)\nprint('done')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "done\n")
