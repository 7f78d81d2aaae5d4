"""How many CPU cores there are for us."""

import os


def available_cores() -> int:
    """CPU cores that this process may run on; where the system does not say, those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
