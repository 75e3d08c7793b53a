#!/usr/bin/env python3
"""The timer on every machine of a slice: deletes the slice when its hours are used up, or when its job has
ended and the launcher does not delete it.

The launcher sends this file as the startup script of the machines. It imports the standard library only."""

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
STATE_DIR = Path(os.environ.get("HEADRACE_TIMER_PLACE", "/var/lib/headrace"))
HOMES = os.environ.get("HEADRACE_TIMER_HOMES", "/home")
ROOT_HOME = os.environ.get("HEADRACE_TIMER_ROOT", "/root")  # of jobs that root started
UNIT_DIR = Path(os.environ.get("HEADRACE_TIMER_UNITS", "/run/systemd/system"))  # exists where systemd runs
POLL = float(os.environ.get("HEADRACE_TIMER_PACE", "20"))  # seconds
IAM_API = os.environ.get("HEADRACE_TIMER_IAM", "https://cloudresourcemanager.googleapis.com")
SAVE_POLLS = 9  # polls that a job has to save
MAX_DELETE_ATTEMPTS = 30  # then the machine is switched off as well
PERMISSION_POLLS = 15  # polls between two checks of the permission, which somebody may grant meanwhile
PERMISSION = "tpu.nodes.delete"  # what the account of the machine needs
YES, NO = f"yes {PERMISSION}", f"no {PERMISSION}"
# systemd starts the timer again whenever it ends, without a limit.
UNIT = """\
[Unit]
Description=Deletes this TPU slice when its time is up
StartLimitIntervalSec=0

[Service]
ExecStart={python} {script} watch
Restart=always
RestartSec=5
OOMScoreAdjust=-1000
"""


def main() -> None:
    """Run the timer in the background: a machine counts as started only when its startup script has ended."""
    if sys.argv[1:] != ["watch"]:
        if start_under_systemd() or os.fork():
            return
        os.setsid()
    # Logs and state may fail to be written, for example on a full disk. The slice is deleted all the same.
    with contextlib.suppress(OSError):
        STATE_DIR.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("-1000")
    log_file = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError):
        log_file = os.open(STATE_DIR / "timer.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log_file, 1), (log_file, 2)):
        os.dup2(source, target)
    watch(boot_time())


def start_under_systemd() -> bool:
    """Start a systemd unit that runs this script; return whether that worked. The unit is not stored on disk:
    at the next boot the startup script runs again."""
    if not UNIT_DIR.is_dir():
        return False
    try:
        script = UNIT_DIR.parent / "headrace-timer.py"
        script.write_text(Path(__file__).read_text())
        (UNIT_DIR / "headrace-timer.service").write_text(UNIT.format(python=sys.executable, script=script))
        for command in ("daemon-reload", "restart headrace-timer"):
            subprocess.run(["systemctl", *command.split()], check=True, timeout=60)
        return True
    except (OSError, subprocess.SubprocessError) as error:
        log(f"systemd: {type(error).__name__}")
        return False


def store_permission() -> None:
    """Write to a file whether this machine may delete its slice; the launcher reads it. If the IAM API does
    not answer, for example because it is off, the file stays as it is."""
    with contextlib.suppress(Exception):
        project = get_attribute("headrace-resource").split("/")[1]
        url = f"{IAM_API}/v1/projects/{project}:testIamPermissions"
        answer = json.loads(call_api("POST", url, json.dumps({"permissions": [PERMISSION]}).encode()))
        (STATE_DIR / "may-delete").write_text(YES if PERMISSION in answer.get("permissions", ()) else NO)


def boot_time() -> float:
    """The time of the first boot of this machine, in seconds since 1970: a restart does not give it more
    time.

    It is the time of an empty file, which can be created on a full disk too; or of one in memory, which at
    least outlives this process."""
    for file in (STATE_DIR / "born", UNIT_DIR.parent / "headrace-born"):
        with contextlib.suppress(OSError):
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT))
            return file.stat().st_mtime
    return time.time()


def watch(booted_at: float) -> None:
    """Poll until the time is up, then stop the jobs and delete the slice. An error ends one poll only."""
    polls, time_limit, idle_limit = 0, None, None
    while True:
        try:
            if polls < 3 or polls % PERMISSION_POLLS == 0:
                store_permission()
            touch_heartbeat()
            time_limit = read_limit("headrace-seconds", time_limit)
            idle_limit = read_limit("headrace-idle", idle_limit)
            if is_expired(booted_at, time_limit, idle_limit):
                break
        except Exception as error:
            log(f"poll: {type(error).__name__}: {error}")
        polls += 1
        time.sleep(POLL)
    with contextlib.suppress(Exception):
        stop_jobs()
    time.sleep(POLL * random.uniform(2, 3))  # lets other workers save; random, so that one of them is first
    delete_slice()


def is_expired(booted_at: float, time_limit: "float | None", idle_limit: "float | None") -> bool:
    """Whether the slice has to be deleted now."""
    if time_limit is not None and time.time() > booted_at + time_limit:
        log("the hours of this slice are used up")
        return True
    if idle_limit and is_idle(booted_at, idle_limit):
        log("the job of this slice has ended, and the launcher did not delete the slice")
        return True
    return False


def touch_heartbeat() -> None:
    """Update the file that shows the launcher that this process lives."""
    with contextlib.suppress(OSError):
        (STATE_DIR / "alive").touch()


def is_idle(booted_at: float, idle_limit: float) -> bool:
    """Whether no job has run on this machine for so many seconds. Before the first job it takes twice as
    long: the launcher has to install everything first."""
    jobs = job_dirs()
    if not jobs:
        return time.time() > booted_at + 2 * idle_limit
    if any(map(running_pid, jobs)):
        return False
    return time.time() > max(map(last_alive_at, jobs)) + idle_limit


def last_alive_at(job_dir: Path) -> float:
    """The time at which a job that does not run was last alive. If its process was killed before it wrote its
    exit code, that is the time of the newest of its other files."""
    times = [0.0]
    for file in (job_dir / "exit", job_dir / "log", job_dir / "pid", job_dir):
        with contextlib.suppress(OSError):
            if file.name == "exit":
                return file.stat().st_mtime
            times.append(file.stat().st_mtime)
    return max(times)


def stop_jobs() -> None:
    """Ask all jobs on this machine to save, and wait until they have ended, for `SAVE_POLLS` at most."""
    for _ in range(SAVE_POLLS):
        pids = [pid for pid in map(running_pid, job_dirs()) if pid]
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)
        time.sleep(POLL)


def job_dirs() -> "list[Path]":
    """The folders of all jobs of all users."""
    user_dirs = [*Path(HOMES).glob("*"), Path(ROOT_HOME)]
    return sorted(job for folder in user_dirs for job in folder.glob(".headrace/jobs/*/"))


def running_pid(job_dir: Path) -> int:
    """The process number of the trainer of a job; 0 if it does not run."""
    try:
        pid = int((job_dir / "pid").read_text())
        command_line = Path(f"/proc/{pid}/cmdline").read_text()  # after a restart it may be another process
    except (OSError, ValueError):
        return 0
    is_trainer = f"/jobs/{job_dir.name}/recipe.yaml" in command_line and not (job_dir / "exit").exists()
    return pid if is_trainer else 0


def delete_slice() -> None:
    """Request the deletion of this slice again and again, until this machine is gone: Google may accept a
    request and then fail."""
    attempts = 0
    while True:
        attempts += 1
        touch_heartbeat()
        try:
            call_api("DELETE", f"{API}/v2/{get_attribute('headrace-resource')}?force=true")
            log("requested the deletion of this slice")
        except urllib.error.HTTPError as error:
            log(f"delete: {error.code} {error.reason}")
            if error.code == 403:
                with contextlib.suppress(OSError):
                    (STATE_DIR / "may-delete").write_text(NO)
        except Exception as error:
            log(f"delete: {type(error).__name__}")
        if attempts >= MAX_DELETE_ATTEMPTS:
            log("this slice could not be deleted; switching the machine off")
            with contextlib.suppress(Exception):
                subprocess.call(os.environ.get("HEADRACE_TIMER_OFF", "shutdown -h now").split())
        time.sleep(POLL)


def call_api(method: str, url: str, body: "bytes | None" = None) -> str:
    """Call an API of Google as the account of this machine, and return the answer."""
    request = urllib.request.Request(url, body, {"Authorization": f"Bearer {access_token()}"}, method=method)
    return urllib.request.urlopen(request, timeout=60).read().decode()


def access_token() -> str:
    """A token of the account of this machine. It is sent to Google only."""
    return json.loads(get_metadata("service-accounts/default/token"))["access_token"]


def get_attribute(name: str) -> str:
    """An attribute that the launcher gave to this machine."""
    return get_metadata(f"attributes/{name}").strip()


def read_limit(name: str, previous: "float | None") -> "float | None":
    """A limit in seconds from the attributes of this machine; the previous one if it cannot be read."""
    try:
        return float(get_attribute(name))
    except Exception:
        return previous


def get_metadata(path: str) -> str:
    """The answer of the metadata server."""
    url = f"http://{METADATA}/computeMetadata/v1/instance/{path}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    return urllib.request.urlopen(request, timeout=10).read().decode()


def log(message: str) -> None:
    """Write a line with the time to the log."""
    with contextlib.suppress(OSError, ValueError):
        os.write(2, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n".encode())


if __name__ == "__main__":
    main()
