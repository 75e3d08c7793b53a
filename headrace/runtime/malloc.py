"""The C library's allocator. By default it hands large blocks back to the system as soon as they are freed,
and the system zeroes fresh ones page by page: a fifth of the time of the demo's steps (two cores of a
virtual machine, 2026-11), a twentieth of the work of preparing data."""

import ctypes
import sys

TRIM, MAPPED, ARENAS = -1, -3, -8  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_ARENA_MAX of glibc

_kept = 0


def keep_freed(up_to: int) -> None:
    """Blocks of up to so many bytes stay with the process for the next of their size, once they are freed."""
    global _kept
    if up_to > _kept:
        _kept = up_to
        for option in (TRIM, MAPPED):
            _set(option, up_to)


def one_arena() -> None:
    """Threads that start after this share one stock of memory. Others have stocks of their own, which later
    threads take over from those that have ended, and of which none holds a block of over 64 MiB: those go
    back to the system whatever is kept."""
    _set(ARENAS, 1)


def _set(option: int, value: int) -> None:
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if mallopt is not None:
            mallopt(option, value)
