"""Polling intervals and timeouts of the launcher, in seconds. Two environment variables set all of it."""

import math
import os

from headrace.errors import UserError


def read_seconds(variable: str, default: float) -> float:
    """The value of an environment variable in seconds, or `default`. Raises UserError unless it is above
    0."""
    text = os.environ.get(variable, "")
    try:
        value = float(text or default)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UserError(f"{variable}: found {text}, expected seconds above 0")
    return value


POLL = read_seconds("HEADRACE_POLL", 10.0)  # between two requests to the cloud
MAX_BACKOFF = read_seconds("HEADRACE_PATIENCE", 300.0)  # longest pause between two attempts
CONNECT_TIMEOUT = MAX_BACKOFF  # for a worker of a slice that is ready to answer
AUTH_RETRY = (
    MAX_BACKOFF / 5
)  # for a worker to accept the key: it gets there a moment after the machine starts
LINK_TIMEOUT = MAX_BACKOFF / 10  # without a connection to a worker until that is reported
SHUTDOWN_GRACE = MAX_BACKOFF  # for trainers to save and end, and for the others to end after the first
DELETE_TIMEOUT = 3 * MAX_BACKOFF  # for a slice to be gone after the first attempt to delete it
SSH_CONNECT = 20.0  # for ssh to get a connection
COMMAND_TIMEOUT = SSH_CONNECT + LINK_TIMEOUT  # for a worker to answer a short command, with the connection
