"""Exit codes, and the errors that a user sees: one sentence without a traceback, and an exit code."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `headrace`.

    The supervisor restarts the trainer after UNREACHABLE, HUNG, MACHINE_FAULT and LOST_HOST."""

    DONE = 0
    FAILED = 1  # an unexpected error, or training that cannot continue
    USER_ERROR = 2  # in a recipe, a path, an option or the data
    DOES_NOT_FIT = 3
    UNREACHABLE = 74  # a server did not respond
    PREEMPTED = 75  # stopped by a signal, after saving; the same command resumes
    HUNG = 76  # a step exceeded its timeout
    MACHINE_FAULT = 77
    LOST_HOST = 78
    INTERRUPTED = 130  # Ctrl-C, as shells report it
    BROKEN_PIPE = 141  # as if ended by SIGPIPE


class UserError(ValueError):
    """A mistake in a recipe, a path, an option or the data. The message says how to correct it."""

    exit_code: int = ExitCode.USER_ERROR


class DoesNotFit(UserError):
    """A valid recipe that needs more memory than these devices have."""

    exit_code = ExitCode.DOES_NOT_FIT


class Unreachable(UserError):
    """A server that did not respond to any of several attempts. Trying again later may work."""

    exit_code = ExitCode.UNREACHABLE
