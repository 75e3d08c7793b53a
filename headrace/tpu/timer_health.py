"""The health of the timers on the machines of a slice, read over ssh.

If the launcher is gone, only they end the bill. Each needs to run and to have the right to delete the
slice."""

import re
from concurrent.futures import ThreadPoolExecutor

from headrace.tpu import clock, timeouts, timer
from headrace.tpu.workers import WorkerFailed, Workers

MAX_SILENCE = 15 * 60  # seconds since the last sign of life
STATUS_SCRIPT = """
cd "${HEADRACE_TIMER_PLACE:-/var/lib/headrace}" 2> /dev/null || exit 0
echo "may-delete: $(cat may-delete 2> /dev/null)"
[ -e alive ] && echo "silent: $(($(date +%s) - $(stat -c %Y alive)))"
exit 0
"""
HEALTHY = ""
GRANT_ROLE = "give it the role TPU Admin (roles/tpu.admin)"
NOT_PERMITTED = f"the account of the machines may not delete TPUs: {GRANT_ROLE}"
PERMISSION_UNKNOWN = (
    "it is not known whether the account of the machines may delete TPUs: `gcloud services enable "
    f"cloudresourcemanager.googleapis.com` lets them find out; {GRANT_ROLE} if it may not"
)
STOPPED = "its timer does not run"
NOT_STARTED = "its timer has not started"


def find_timer_problem(workers: Workers, retry_seconds: float = 0.0) -> str:
    """Why a slice may fail to delete itself, or the empty string if at least one of its machines can.

    The machines of a new slice look up their rights when they start, so problems that may pass are checked
    again for `retry_seconds`."""
    deadline = clock.monotonic() + retry_seconds
    while True:
        problem = query_timer(workers, 0)
        if problem and len(workers) > 1:
            with ThreadPoolExecutor(min(64, len(workers))) as pool:
                problems = list(pool.map(lambda worker: query_timer(workers, worker), range(1, len(workers))))
            problem = HEALTHY if HEALTHY in problems else problem
        if not problem or problem == NOT_PERMITTED or clock.monotonic() > deadline:
            return problem
        clock.sleep(0.5)


def query_timer(workers: Workers, worker: int) -> str:
    """The problem with the timer on one worker, or the empty string."""
    try:
        status = workers.run_on(worker, STATUS_SCRIPT, timeout=timeouts.COMMAND_TIMEOUT)
    except WorkerFailed as error:
        return f"[w{worker}] its timer cannot be checked: {error.output}"
    return parse_timer_status(status)


def parse_timer_status(status: str) -> str:
    """The problem that the output of `STATUS_SCRIPT` shows, or the empty string."""
    if f"may-delete: {timer.NO}" in status:
        return NOT_PERMITTED
    silence = re.search(r"^silent: (-?\d+)$", status, re.M)
    if silence is None:
        return NOT_STARTED
    if int(silence[1]) > MAX_SILENCE:
        return f"{STOPPED} since {int(silence[1]) / 3600:.1f} h"
    return HEALTHY if f"may-delete: {timer.YES}" in status else PERMISSION_UNKNOWN


def format_warning(name: str, problem: str) -> str:
    """Warning that a slice may fail to delete itself."""
    return f"warning: {name} may fail to delete itself, and then costs money until you delete it: {problem}"
