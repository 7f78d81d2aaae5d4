"""What is freed: kept for the next step, or returned."""

import glob
import subprocess
import sys

import pytest

from refusion_jax.distributed.host_memory import ACCELERATORS


def said_by(program: str) -> int:
    """The number that a program prints, which has allocated nothing before."""
    return int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(any(map(glob.glob, ACCELERATORS)), reason="with an accelerator memory is returned")
def test_large_arrays_of_threads_take_the_same_pages_each_time():
    """The kernel would clear 3 x 16,384 pages."""
    faults = """if True:
        import resource, threading
        from refusion_jax.distributed.host_memory import keep_freed_memory

        keep_freed_memory()
        for step in range(4):
            if step == 1:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            thread = threading.Thread(target=lambda: b"x" * (1 << 26))
            thread.start()
            thread.join()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    """
    assert said_by(faults) < 1_000


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_free_is_returned_also_between_what_is_in_use():
    """Of 8,192 pieces of 16 KiB every second one is freed, of each of which three pages or four."""
    returned = """if True:
        import mmap
        from refusion_jax.distributed.host_memory import return_freed_memory

        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * mmap.PAGESIZE >> 20

        kept = [b"x" * (1 << 14) for _ in range(8192)]
        del kept[::2]
        before = resident()
        return_freed_memory()
        print(before - resident())
    """
    assert said_by(returned) > 40
