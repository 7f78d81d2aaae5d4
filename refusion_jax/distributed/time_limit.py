"""A limit on the processor time of code that calls into strangers' files."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Ends what the block does after so many seconds of this process's user time; a busy machine costs nothing.

    Regular expressions and other Python code are ended; a call into a library is so only when it returns. There is no
    limit in another thread than the main one, which signals do not reach, nor where a library handles this signal.

    Raises:
      TimeoutError: where the block takes longer.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGVTALRM) is None:
        yield
        return

    def end(*_) -> None:
        raise TimeoutError(f"it takes more than {seconds:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
