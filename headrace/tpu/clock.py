"""The clock of the launcher. Everything in tpu/ that waits does so here, so that a test can skip the
waiting."""

import time


def now() -> float:
    """Seconds since 1970."""
    return time.time()


def monotonic() -> float:
    """Seconds since an arbitrary moment. Never goes back."""
    return time.monotonic()


def sleep(seconds: float) -> None:
    """Wait. Returns at once for a duration that is not positive."""
    if seconds > 0:
        time.sleep(seconds)
