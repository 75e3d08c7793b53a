"""How often the launcher looks and how long it waits, in seconds; both can be set, apart from each other."""

import math
import os

from headrace.errors import UserError


def seconds(name: str, usual: float) -> float:
    text = os.environ.get(name, "")
    try:
        found = float(text or usual)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise UserError(f"{name}: found {text}, expected seconds above 0")
    return found


POLL = seconds("HEADRACE_POLL", 10.0)  # between two looks at the cloud
PATIENCE = seconds("HEADRACE_PATIENCE", 300.0)
REACH = PATIENCE  # in which a machine that is said to be ready should answer
DENIED = PATIENCE / 5  # and one that answers, but lets us not in: keys come a moment after the machine
BROKEN = PATIENCE / 10  # after which a broken connection is told
REST = PATIENCE  # that other workers have to end after the first, and all have to save
GIVE_UP = 3 * PATIENCE  # of trying to delete
