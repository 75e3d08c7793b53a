#!/usr/bin/env python3
"""The timer that every machine of a slice starts for itself, and that gives the slice back when its hours are
over or its job has ended and nobody came for it. Read by the launcher as text: the standard library alone."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

METADATA = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
API = os.environ.get("MILLRACE_TIMER_API", "https://tpu.googleapis.com")
PLACE = Path(os.environ.get("MILLRACE_TIMER_PLACE", "/var/lib/millrace"))
HOMES = os.environ.get("MILLRACE_TIMER_HOMES", "/home")
PACE = float(os.environ.get("MILLRACE_TIMER_PACE", "20"))  # seconds between two looks
IAM = os.environ.get("MILLRACE_TIMER_IAM", "https://cloudresourcemanager.googleapis.com")
SAVING = 9  # looks that a job has to save itself
TRIES = 30  # to delete the slice, before the machine is switched off at least
NEEDED = "tpu.nodes.delete"  # what the account of the machine must be allowed
NO = f"no {NEEDED}"
VERDICT = (
    'cat "${MILLRACE_TIMER_PLACE:-/var/lib/millrace}/may-delete" 2> /dev/null || true'  # for the launcher
)


def main() -> None:
    """Goes on in the background: a machine does not count as started before its startup script has ended."""
    if os.fork():
        return
    os.setsid()
    PLACE.mkdir(parents=True, exist_ok=True)
    log = os.open(PLACE / "timer.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
        os.dup2(number, target)
    since = born()
    ask_permission()
    watch(since)


def ask_permission() -> None:
    """Writes down whether this machine may delete its slice, for who is there to put it right. Where that
    cannot be asked (the API for it is off), nothing is known."""
    with contextlib.suppress(Exception):
        project = attribute("millrace-resource").split("/")[1]
        url = f"{IAM}/v1/projects/{project}:testIamPermissions"
        told = json.loads(call("POST", url, json.dumps({"permissions": [NEEDED]}).encode()))
        (PLACE / "may-delete").write_text(f"yes {NEEDED}" if NEEDED in told.get("permissions", ()) else NO)


def born() -> float:
    """When this machine first started; a restart does not give it more time."""
    file = PLACE / "born"
    try:
        return float(file.read_text())
    except (OSError, ValueError):
        file.write_text(str(time.time()))
        return time.time()


def watch(since: float) -> None:
    seconds, idle = None, None
    while True:
        seconds = number("millrace-seconds", seconds)
        idle = number("millrace-idle", idle)
        if seconds is not None and time.time() > since + seconds:
            say("the hours of this slice are over")
            break
        if idle and forgotten(since, idle):
            say("the job of this slice has ended, and nobody gave it back")
            break
        time.sleep(PACE)
    stop()
    time.sleep(PACE * random.uniform(2, 3))  # the other workers save too, and one of them is the first
    give_back()


def forgotten(since: float, idle: float) -> bool:
    """Whether nothing runs here, and nothing has for that long."""
    jobs = places()
    if not jobs:
        return time.time() > since + 2 * idle  # the launcher went away before it had set up anything
    if any(map(running, jobs)):
        return False
    return time.time() > max(map(ended, jobs)) + idle


def ended(job: Path) -> float:
    """When a job that does not run was last alive: who holds it may have been killed before it wrote that."""
    times = [0.0]
    for file in (job / "exit", job / "log", job / "pid", job):
        with contextlib.suppress(OSError):
            if file.name == "exit":
                return file.stat().st_mtime
            times.append(file.stat().st_mtime)
    return max(times)


def stop() -> None:
    """Lets jobs save and end."""
    for _ in range(SAVING):
        alive = [pid for pid in map(running, places()) if pid]
        if not alive:
            return
        for pid in alive:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)
        time.sleep(PACE)


def places() -> "list[Path]":
    return sorted(Path(HOMES).glob("*/.millrace/jobs/*/"))


def running(job: Path) -> int:
    try:
        pid = int((job / "pid").read_text())
        command = Path(f"/proc/{pid}/cmdline").read_text()  # a number may be another's after a restart
    except (OSError, ValueError):
        return 0
    return 0 if (job / "exit").exists() or f"/jobs/{job.name}/recipe.yaml" not in command else pid


def give_back() -> None:
    """Goes on for as long as this machine lives: that a delete was accepted does not mean that it is done."""
    tries = 0
    while True:
        tries += 1
        try:
            call("DELETE", f"{API}/v2/{attribute('millrace-resource')}?force=true")
            say("asked to be deleted")
        except urllib.error.HTTPError as error:
            say(f"delete: {error.code} {error.reason}")
        except Exception as error:
            say(f"delete: {type(error).__name__}")
        if tries >= TRIES:
            say("this slice is not deleted; switched off")
            subprocess.call(os.environ.get("MILLRACE_TIMER_OFF", "shutdown -h now").split())
        time.sleep(PACE)


def call(method: str, url: str, body: "bytes | None" = None) -> str:
    request = urllib.request.Request(url, body, {"Authorization": f"Bearer {token()}"}, method=method)
    return urllib.request.urlopen(request, timeout=60).read().decode()


def token() -> str:
    """Of the machine's own account; never leaves this process but for Google."""
    return json.loads(get("service-accounts/default/token"))["access_token"]


def attribute(name: str) -> str:
    return get(f"attributes/{name}").strip()


def number(name: str, before: "float | None") -> "float | None":
    """As it is now; as it was where that cannot be asked."""
    try:
        return float(attribute(name))
    except Exception:
        return before


def get(path: str) -> str:
    url = f"http://{METADATA}/computeMetadata/v1/instance/{path}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    return urllib.request.urlopen(request, timeout=10).read().decode()


def say(words: str) -> None:
    print(time.strftime("%Y-%m-%d %H:%M:%S"), words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
