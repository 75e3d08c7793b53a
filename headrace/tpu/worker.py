"""What runs on a worker: starts the trainer apart from whoever asked for it, follows what it says, ends it.
`python -m headrace.tpu.worker start|follow|stop|state JOB`, by the launcher; the standard library alone."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

KILLED = 137  # the exit code of a job that left none
BROKEN = 255  # ssh's own, for a connection that broke; a trainer that ends with it is told as the one below
PACE = 0.2
RECENT = 4096  # bytes of a log that are shown to who comes later


def main(argv: list[str]) -> int:
    act, job = argv[0], Path.home() / ".headrace" / "jobs" / argv[1]
    if act == "start":
        return start(job, argv[2])
    if act == "hold":
        return hold(job)
    if act == "follow":
        return follow(job, int(argv[2]))
    if act == "stop":
        return stop(job, argv[2])
    print(json.dumps(state(job)))
    return 0


def start(job: Path, identity: str) -> int:
    """Says `running` if that very job runs already, `other` if another does. Standard input holds the
    variables that it is to see, apart by NUL, and then its recipe."""
    given = sys.stdin.buffer.read().decode().split("\0")
    now = state(job)
    if now["running"]:
        print("running" if now["identity"] == identity else "other", now["recent"])
        return 0
    job.mkdir(parents=True, exist_ok=True)
    for name in ("pid", "exit"):
        (job / name).unlink(missing_ok=True)
    (job / "recipe.yaml").write_text(given[-1])
    (job / "identity").write_text(identity)
    env = os.environ | dict(pair.split("=", 1) for pair in given[:-1])
    with open(job / "log", "ab") as log:
        subprocess.Popen(
            [sys.executable, "-m", "headrace.tpu.worker", "hold", job.name],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    end = time.monotonic() + 60
    while not (job / "pid").exists() and not (job / "exit").exists() and time.monotonic() < end:
        time.sleep(0.02)
    print("started", now["bytes"])
    return 0


def hold(job: Path) -> int:
    """Waits for the trainer and writes down how it ended."""
    python = Path.home() / ".headrace" / "env" / "bin" / "python"
    command = [str(python), "-m", "headrace", "train", str(job / "recipe.yaml")]
    trainer = subprocess.Popen(command, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    write(job / "pid", str(trainer.pid))
    signal.signal(signal.SIGTERM, lambda *_: trainer.terminate())  # a machine that shuts down
    code = trainer.wait()
    write(job / "exit", str(128 - code if code < 0 else code))
    return 0


def write(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def follow(job: Path, offset: int) -> int:
    """The log from there on, until the job has ended; returns its exit code."""
    with open(job / "log", "rb") as log:
        log.seek(offset)
        while True:
            ended = not state(job)["running"]  # asked first: what is said before the end is not lost
            while piece := log.read(65536):
                sys.stdout.buffer.write(piece)
                sys.stdout.buffer.flush()
            if ended:
                return exit_code(job)
            time.sleep(PACE)


def exit_code(job: Path) -> int:
    """Written a moment after the trainer is gone, unless who writes it was killed too."""
    for _ in range(10):
        if (code := number(job / "exit")) is not None:
            return min(code, BROKEN - 1)
        time.sleep(PACE)
    return KILLED


def stop(job: Path, how: str) -> int:
    """Asks the trainer to save and end, or ends it."""
    now = state(job)
    if now["running"]:
        if how == "kill":  # with all its children, which are in its group
            os.killpg(os.getpgid(now["pid"]), signal.SIGKILL)
        else:
            os.kill(now["pid"], signal.SIGTERM)
    return 0


def state(job: Path) -> dict:
    """A number of a process may be another's after a restart of the machine: its command line tells."""
    pid, code = number(job / "pid"), number(job / "exit")
    try:
        identity = (job / "identity").read_text()
        size = (job / "log").stat().st_size
        recent, last = tail(job / "log", size)
    except OSError:
        identity, size, recent, last = "", 0, 0, ""
    running = pid is not None and code is None and is_trainer(pid, job)
    return dict(identity=identity, pid=pid, running=running, exit=code, bytes=size, recent=recent, last=last)


def is_trainer(pid: int, job: Path) -> bool:
    try:
        said = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        if Path("/proc/self").exists():
            return False
        ask = ["ps", "-ww", "-o", "args=", "-p", str(pid)]  # as on a Mac
        said = subprocess.run(ask, capture_output=True, text=True).stdout
    return str(job / "recipe.yaml") in said


def number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def tail(path: Path, size: int) -> tuple[int, str]:
    """Where the last lines of a log begin, and the last of them."""
    with open(path, "rb") as file:
        file.seek(max(0, size - RECENT))
        if size > RECENT:
            file.readline()
        begin = file.tell()
        lines = file.read().decode(errors="replace").strip().splitlines()
    return begin, lines[-1] if lines else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
