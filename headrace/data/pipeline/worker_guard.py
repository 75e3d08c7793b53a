"""Ends workers together with the process that started them.

A worker whose parent was killed must not keep writing to a folder that another process may already use. Only
the server that forks workers imports this module, before any other."""

import ctypes
import os
import signal
import sys

from headrace.data.pipeline.pool import MASTER

PR_SET_PDEATHSIG = 1  # prctl option, which a fork does not inherit

server = os.getpid()  # in a worker, this is still the process id of the server


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent, of this process id, ends. Ctrl-C is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


die_with_parent(int(os.environ[MASTER]))
