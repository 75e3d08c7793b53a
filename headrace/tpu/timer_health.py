"""Whether the timer on the machines of a slice lives and may delete it, and what to say where that is not
known: nobody else ends the bill when the launcher is gone."""

import re
import time
from concurrent.futures import ThreadPoolExecutor

from headrace.tpu import timer
from headrace.tpu.workers import ANSWER, Failed, Workers

SILENT = 15 * 60  # seconds without a sign of life
ASK = """
cd "${HEADRACE_TIMER_PLACE:-/var/lib/headrace}" 2> /dev/null || exit 0
echo "may-delete: $(cat may-delete 2> /dev/null)"
[ -e alive ] && echo "silent: $(($(date +%s) - $(stat -c %Y alive)))"
exit 0
"""
WELL = ""
ROLE = "give it the role TPU Admin (roles/tpu.admin)"
REFUSED = f"the account of the machines may not delete TPUs: {ROLE}"
UNKNOWN = (
    "it is not known whether the account of the machines may delete TPUs: `gcloud services enable "
    f"cloudresourcemanager.googleapis.com` lets them ask; {ROLE} if it has not"
)
DEAD = "its timer does not run"
NEVER = "its timer has not started"


def doubt(workers: Workers, patience: float = 0.0) -> str:
    """Why a slice may not end itself, or nothing. One machine that can is enough. A slice that has just come
    to be is given some seconds: its machines ask what they may do when they start."""
    end = time.monotonic() + patience
    while True:
        words = of(workers, 0)
        if words and len(workers) > 1:
            with ThreadPoolExecutor(min(64, len(workers))) as pool:
                rest = list(pool.map(lambda worker: of(workers, worker), range(1, len(workers))))
            words = WELL if WELL in rest else words
        if not words or words == REFUSED or time.monotonic() > end:
            return words
        time.sleep(0.5)


def of(workers: Workers, worker: int) -> str:
    try:
        said = workers.one(worker, ASK, limit=ANSWER)
    except Failed as why:
        return f"[w{worker}] cannot be asked after its timer: {why.said}"
    return read(said)


def read(said: str) -> str:
    if f"may-delete: {timer.NO}" in said:
        return REFUSED
    silent = re.search(r"^silent: (-?\d+)$", said, re.M)
    if silent is None:
        return NEVER
    if int(silent[1]) > SILENT:
        return f"{DEAD} since {int(silent[1]) / 3600:.1f} h"
    return WELL if f"may-delete: {timer.YES}" in said else UNKNOWN


def warning(name: str, why: str) -> str:
    return f"warning: {name} may not end itself, and cost money until you delete it: {why}"
