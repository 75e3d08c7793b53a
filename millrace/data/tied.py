"""Ties the life of the process that imports this to its parent's: workers whose master was killed must not go
on writing into a folder that another may fill by then. The server that forks workers imports it first."""

import ctypes
import signal
import sys

DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG, which a fork does not inherit


def tie() -> None:
    """From now on the kernel kills this process when its parent ends. Ctrl-C is the parent's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)


tie()
