"""What Linux tells of its processes, in /proc; None where the system does not tell."""

from pathlib import Path


def started(pid: int) -> str | None:
    """When a process began, in clock ticks since the boot; None, too, where it runs no more."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
