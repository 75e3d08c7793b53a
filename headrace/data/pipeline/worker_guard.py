"""Ties the life of workers to their master's: one whose master was killed must not go on writing into a
folder that another may fill by then. Only the server that forks workers imports this, before all else."""

import ctypes
import os
import signal
import sys

from headrace.data.pipeline.pool import MASTER

DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG, which a fork does not inherit

server = os.getpid()  # in a worker this is still the server's


def tie(parent: int) -> None:
    """From now on the kernel kills this process when its parent ends. Ctrl-C is the parent's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        os._exit(1)


tie(int(os.environ[MASTER]))
