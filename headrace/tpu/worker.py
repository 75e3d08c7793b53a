"""The part of the launcher that runs on a worker: starts the trainer, follows its log, stops it.

`python -m headrace.tpu.worker start|follow|stop|state JOB`. It imports the standard library only. The trainer
does not depend on the connection of the launcher."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TypedDict

KILLED = 137  # exit code of a job that left none
LINK_BROKEN = 255  # ssh's own exit code; that of a trainer is reported as 254
POLL = 0.2  # seconds
TAIL_BYTES = 4096  # of an existing log that a new follower shows
START_TIMEOUT = 60.0  # seconds for the process that holds the trainer to write its number


class JobState(TypedDict):
    """The answer to `state`: JSON that the launcher reads."""

    identity: str  # of the recipe; empty if there never was a job
    pid: int | None
    running: bool
    exit: int | None
    bytes: int  # size of the log
    recent: int  # where the last lines of the log begin
    last: str  # its last line


def main(argv: list[str]) -> int:
    """Run one of the commands, and return its exit code."""
    command, job_dir = argv[0], Path.home() / ".headrace" / "jobs" / argv[1]
    if command == "start":
        return run_start_command(job_dir, argv[2])
    if command == "hold":
        return run_trainer(job_dir)
    if command == "follow":
        return print_log_until_exit(job_dir, int(argv[2]))
    if command == "stop":
        return stop_trainer(job_dir, argv[2])
    print(json.dumps(read_state(job_dir)))
    return 0


def run_start_command(job_dir: Path, identity: str) -> int:
    """Start the trainer, in the background, unless one runs already. Standard input holds variables of its
    environment, each ended by NUL, and then its recipe.

    Prints the result and an offset in the log: `started`, `running` if this very job runs already, or `other`
    if another one does."""
    *variables, recipe = sys.stdin.buffer.read().decode().split("\0")
    state = read_state(job_dir)
    if state["running"]:
        print("running" if state["identity"] == identity else "other", state["recent"])
        return 0
    job_dir.mkdir(parents=True, exist_ok=True)
    for name in ("pid", "exit"):
        (job_dir / name).unlink(missing_ok=True)
    (job_dir / "recipe.yaml").write_text(recipe)
    (job_dir / "identity").write_text(identity)
    env = os.environ | dict(variable.split("=", 1) for variable in variables)
    with open(job_dir / "log", "ab") as log:
        subprocess.Popen(
            [sys.executable, "-m", "headrace.tpu.worker", "hold", job_dir.name],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_TIMEOUT
    while not (job_dir / "pid").exists() and not (job_dir / "exit").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    print("started", state["bytes"])
    return 0


def run_trainer(job_dir: Path) -> int:
    """Run the trainer, and write its process number and its exit code to files."""
    python = Path.home() / ".headrace" / "env" / "bin" / "python"
    command = [str(python), "-m", "headrace", "train", str(job_dir / "recipe.yaml")]
    trainer = subprocess.Popen(command, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    write_atomic(job_dir / "pid", str(trainer.pid))
    signal.signal(signal.SIGTERM, lambda *_: trainer.terminate())  # when the machine shuts down
    code = trainer.wait()
    write_atomic(job_dir / "exit", str(128 - code if code < 0 else code))
    return 0


def write_atomic(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or nothing."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def print_log_until_exit(job_dir: Path, offset: int) -> int:
    """Print the log from an offset on until the job has ended, and return its exit code."""
    with open(job_dir / "log", "rb") as log:
        log.seek(offset)
        while True:
            has_ended = not read_state(job_dir)[
                "running"
            ]  # before the read, so that the last lines are not lost
            while chunk := log.read(65536):
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
            if has_ended:
                return wait_for_exit_code(job_dir)
            time.sleep(POLL)


def wait_for_exit_code(job_dir: Path) -> int:
    """The exit code of a job that does not run. It is written a moment after the trainer ends; `KILLED` if
    the process that writes it was killed too."""
    for _ in range(10):
        if (code := read_int(job_dir / "exit")) is not None:
            return min(code, LINK_BROKEN - 1)
        time.sleep(POLL)
    return KILLED


def stop_trainer(job_dir: Path, method: str) -> int:
    """Ask the trainer to save and end, or with method `kill` end it at once with all its children."""
    state = read_state(job_dir)
    if state["running"] and state["pid"] is not None:
        if method == "kill":
            os.killpg(os.getpgid(state["pid"]), signal.SIGKILL)
        else:
            os.kill(state["pid"], signal.SIGTERM)
    return 0


def read_state(job_dir: Path) -> JobState:
    """The state of a job from the files in its folder."""
    pid, code = read_int(job_dir / "pid"), read_int(job_dir / "exit")
    try:
        identity = (job_dir / "identity").read_text()
        size = (job_dir / "log").stat().st_size
        recent, last = read_tail(job_dir / "log", size)
    except OSError:
        identity, size, recent, last = "", 0, 0, ""
    running = pid is not None and code is None and is_trainer(pid, job_dir)
    return JobState(
        identity=identity, pid=pid, running=running, exit=code, bytes=size, recent=recent, last=last
    )


def is_trainer(pid: int, job_dir: Path) -> bool:
    """Whether a process is the trainer of this job, by its command line. After a restart of the machine its
    number may belong to another process."""
    try:
        command_line = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        if Path("/proc/self").exists():
            return False
        ps = ["ps", "-ww", "-o", "args=", "-p", str(pid)]  # on a Mac
        command_line = subprocess.run(ps, capture_output=True, text=True).stdout
    return str(job_dir / "recipe.yaml") in command_line


def read_int(path: Path) -> int | None:
    """The number in a file, or None."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def read_tail(path: Path, size: int) -> tuple[int, str]:
    """Find where the last lines of a log of this size begin; return that offset and the last line."""
    with open(path, "rb") as file:
        file.seek(max(0, size - TAIL_BYTES))
        if size > TAIL_BYTES:
            file.readline()  # the rest of a line
        offset = file.tell()
        lines = file.read().decode(errors="replace").strip().splitlines()
    return offset, lines[-1] if lines else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
