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
API = os.environ.get("HEADRACE_TIMER_API", "https://tpu.googleapis.com")
PLACE = Path(os.environ.get("HEADRACE_TIMER_PLACE", "/var/lib/headrace"))
HOMES = os.environ.get("HEADRACE_TIMER_HOMES", "/home")
ROOT = os.environ.get("HEADRACE_TIMER_ROOT", "/root")  # the home of who launched as root
UNITS = Path(os.environ.get("HEADRACE_TIMER_UNITS", "/run/systemd/system"))  # there where systemd is
PACE = float(os.environ.get("HEADRACE_TIMER_PACE", "20"))  # seconds between two looks
IAM = os.environ.get("HEADRACE_TIMER_IAM", "https://cloudresourcemanager.googleapis.com")
SAVING = 9  # looks that a job has to save itself
TRIES = 30  # to delete the slice, before the machine is switched off at least
ASKS = 15  # looks between two questions what this machine may do: somebody may give it the role
NEEDED = "tpu.nodes.delete"  # what the account of the machine must be allowed
YES, NO = f"yes {NEEDED}", f"no {NEEDED}"
# Under systemd, which starts it again whatever ends it, and as often as it takes.
UNIT = """\
[Unit]
Description=Gives this TPU slice back
StartLimitIntervalSec=0

[Service]
ExecStart={python} {script} watch
Restart=always
RestartSec=5
OOMScoreAdjust=-1000
"""


def main() -> None:
    """Goes on in the background: a machine does not count as started before its startup script has ended."""
    if sys.argv[1:] != ["watch"]:
        if under_systemd() or os.fork():
            return
        os.setsid()
    # What is told and written down may fail, as on a disk that is full; what costs money ends all the same.
    with contextlib.suppress(OSError):
        PLACE.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("-1000")
    log = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError):
        log = os.open(PLACE / "timer.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
        os.dup2(number, target)
    watch(born())


def under_systemd() -> bool:
    """Whether a unit of it runs this script now. Nothing of it is on a disk: at the next start of the machine
    the startup script comes again."""
    if not UNITS.is_dir():
        return False
    try:
        script = UNITS.parent / "headrace-timer.py"
        script.write_text(Path(__file__).read_text())
        (UNITS / "headrace-timer.service").write_text(UNIT.format(python=sys.executable, script=script))
        for words in ("daemon-reload", "restart headrace-timer"):
            subprocess.run(["systemctl", *words.split()], check=True, timeout=60)
        return True
    except (OSError, subprocess.SubprocessError) as error:
        say(f"systemd: {type(error).__name__}")
        return False


def ask_permission() -> None:
    """Writes down whether this machine may delete its slice, for who is there to put it right. Where that
    cannot be asked (the API for it is off), nothing is known."""
    with contextlib.suppress(Exception):
        project = attribute("headrace-resource").split("/")[1]
        url = f"{IAM}/v1/projects/{project}:testIamPermissions"
        told = json.loads(call("POST", url, json.dumps({"permissions": [NEEDED]}).encode()))
        (PLACE / "may-delete").write_text(YES if NEEDED in told.get("permissions", ()) else NO)


def born() -> float:
    """When this machine first started; a restart does not give it more time. An empty file has a time, and
    room on a disk that is full; what is in memory outlives us at least."""
    for file in (PLACE / "born", UNITS.parent / "headrace-born"):
        with contextlib.suppress(OSError):
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT))
            return file.stat().st_mtime
    return time.time()


def watch(since: float) -> None:
    """Whatever goes wrong with one look, there is another."""
    looks, seconds, idle = 0, None, None
    while True:
        try:
            if looks < 3 or looks % ASKS == 0:
                ask_permission()
            beat()
            seconds = number("headrace-seconds", seconds)
            idle = number("headrace-idle", idle)
            if over(since, seconds, idle):
                break
        except Exception as error:
            say(f"look: {type(error).__name__}: {error}")
        looks += 1
        time.sleep(PACE)
    with contextlib.suppress(Exception):
        stop()
    time.sleep(PACE * random.uniform(2, 3))  # the other workers save too, and one of them is the first
    give_back()


def over(since: float, seconds: "float | None", idle: "float | None") -> bool:
    if seconds is not None and time.time() > since + seconds:
        say("the hours of this slice are over")
        return True
    if idle and forgotten(since, idle):
        say("the job of this slice has ended, and nobody gave it back")
        return True
    return False


def beat() -> None:
    """Shows whoever asks that this lives."""
    with contextlib.suppress(OSError):
        (PLACE / "alive").touch()


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
    homes = [*Path(HOMES).glob("*"), Path(ROOT)]
    return sorted(job for home in homes for job in home.glob(".headrace/jobs/*/"))


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
        beat()
        try:
            call("DELETE", f"{API}/v2/{attribute('headrace-resource')}?force=true")
            say("asked to be deleted")
        except urllib.error.HTTPError as error:
            say(f"delete: {error.code} {error.reason}")
            if error.code == 403:
                with contextlib.suppress(OSError):
                    (PLACE / "may-delete").write_text(NO)
        except Exception as error:
            say(f"delete: {type(error).__name__}")
        if tries >= TRIES:
            say("this slice is not deleted; switched off")
            with contextlib.suppress(Exception):
                subprocess.call(os.environ.get("HEADRACE_TIMER_OFF", "shutdown -h now").split())
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
    with contextlib.suppress(OSError, ValueError):
        os.write(2, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {words}\n".encode())


if __name__ == "__main__":
    main()
