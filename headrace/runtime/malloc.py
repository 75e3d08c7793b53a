"""Settings of the C library's allocator.

By default it returns large blocks to the system as soon as they are freed, and the system zeroes new ones
page by page: a fifth of the time of the demo's steps (two cores of a virtual machine, 2026-11), a twentieth
of the work of preparing data."""

import ctypes
import sys

# Options of glibc's mallopt.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8

_largest_block = 0  # bytes of the largest freed block that the process keeps


def keep_freed(max_bytes: int) -> None:
    """Keep freed blocks of up to `max_bytes` in the process, for the next of their size."""
    global _largest_block
    if max_bytes > _largest_block:
        _largest_block = max_bytes
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            _set_option(option, max_bytes)


def use_one_arena() -> None:
    """Let threads that start after this share one pool of memory (arena).

    Otherwise threads have pools of their own, which later threads inherit from those that have ended. None of
    these holds a block of over 64 MiB: such blocks are returned to the system in spite of `keep_freed`."""
    _set_option(M_ARENA_MAX, 1)


def _set_option(option: int, value: int) -> None:
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if mallopt is not None:
            mallopt(option, value)
