"""How a life of a job ends and what that means, and how a slice is given back."""

import dataclasses
import shlex
import time
from collections.abc import Callable
from enum import Enum

from headrace.runtime import supervisor as supervise
from headrace.errors import UserError
from headrace.tpu import gcloud
from headrace.tpu.cloud import Cloud, Rented, State
from headrace.tpu.timeouts import GIVE_UP, POLL
from headrace.tpu.console import complain, whisper


class End(Enum):
    DONE = "done"
    LOST = "the slice was taken away"
    AGAIN = "the trainer ended and can go on"
    SET_UP = "setting up failed"
    WORN = "a machine of the slice is faulty"
    UNREACHED = "the workers cannot be reached from here"
    DELETED = "the slice was deleted by somebody else"
    HALTED = "the machines were stopped by somebody else"
    MISTAKE = "a mistake"
    OVER = "the hours are over"
    STOPPED = "stopped"


@dataclasses.dataclass(frozen=True)
class Outcome:
    end: End
    code: int = 0
    words: str = ""


def verdict(codes: list[int]) -> Outcome:
    """What the exit codes of all workers come to."""
    if not any(codes):
        return Outcome(End.DONE)
    for code in (2, 3, 1):
        if code in codes:
            return Outcome(End.MISTAKE, code, f"ended with {code} on w{codes.index(code)}")
    worst = next(code for code in codes if code)
    words = ", ".join(f"w{number}: {code}" for number, code in enumerate(codes) if code)
    if supervise.MACHINE in codes:
        return Outcome(End.WORN, supervise.MACHINE, f" ({words})")
    return Outcome(End.AGAIN, worst, f" ({words})")


def give_back(
    cloud: Cloud, name: str, say: Callable[[str], None], zone: str = "", known: Rented | None = None
) -> bool:
    """Deletes, and looks until it is gone. What fails is tried again; that it failed is told with the command
    by which it can be done by hand. `zone` is where it was seen: others that do not answer keep nothing here.
    Another that was made since under the name of the `known` one is not ours to delete.
    That nobody listens (`| head`) ends nothing here: what is said comes after what is done."""
    end, asked, told = time.monotonic() + GIVE_UP, 0.0, ""
    while True:
        words = ""
        try:
            found = cloud.find(name, zone)
            if found is None or known is not None and found.replaces(known):
                whisper(say, f"{name} is deleted")
                return True
            zone = found.zone
            if found.state is not State.DELETING or time.monotonic() - asked > 6 * POLL:
                cloud.delete(found)
                words, asked = f"deletes {name}", time.monotonic()
        except Exception as why:  # also of which nobody thought: what is left costs
            words = f"deleting {name}: {why if isinstance(why, UserError) else repr(why)}; tries again"
        if words and words != told:
            whisper(say, words)
            told = words
        if time.monotonic() > end:
            command = shlex.join(gcloud.delete(getattr(cloud, "project", "PROJECT"), name, zone or "ZONE"))
            whisper(complain, f"headrace: {name} COULD NOT BE DELETED AND COSTS MONEY: {command}")
            return False
        time.sleep(min(POLL, 2.0))
