"""The machines of a slice, as places where a bash script can be run: by ssh, or as processes of this machine.
What is secret goes over standard input, never into a command line or a file."""

import getpass
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from headrace.errors import UserError
from headrace.tpu.timeouts import BROKEN, DENIED

UNREACHABLE = 255  # ssh's own exit code
CONNECT = 20  # seconds that ssh has for a connection
ANSWER = CONNECT + BROKEN  # and a worker for a short answer, with the connection
KEYS = ("google_compute_engine", "id_ed25519", "id_rsa")  # the first is gcloud's


class Failed(UserError):
    """What a worker was to do went wrong, or the worker could not be reached at all."""

    code = 1

    def __init__(self, worker: int, exit_code: int, said: str) -> None:
        last = " | ".join(line for line in said.strip().splitlines()[-3:])
        super().__init__(f"[w{worker}] ended with {exit_code}: {last}"[:600])
        self.exit_code, self.said = exit_code, last


@dataclass(frozen=True)
class Place:
    """One worker: how a script gets there."""

    argv: tuple[str, ...]  # before the script; it is one argument of a shell there
    env: Mapping[str, str] = field(default_factory=dict)  # of the process here
    remote: bool = True
    shell: tuple[str, ...] = ("bash",)  # for who wants to type there

    def command(self, script: str) -> list[str]:
        if self.remote:  # what ssh is given is read by a shell over there
            return [*self.argv, f"bash -c {shlex.quote(script)}"]
        return [*self.argv, "bash", "-c", script]


class Workers:
    def __init__(self, places: Sequence[Place]) -> None:
        self.places = list(places)
        self.live: set[subprocess.Popen[bytes]] = set()
        self.reached: set[int] = set()
        self.trouble: Callable[[int, str], None] = lambda worker, said: None  # hears of each failed try

    def __len__(self) -> int:
        return len(self.places)

    def start(self, worker: int, script: str, stderr: int = subprocess.STDOUT) -> subprocess.Popen[bytes]:
        """A process here that is that script there."""
        place = self.places[worker]
        try:
            return subprocess.Popen(
                place.command(script),
                env=os.environ | place.env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,  # Ctrl-C is for the launcher
            )
        except OSError as why:  # no such program, no memory for it: nothing is known of the worker
            raise Failed(worker, UNREACHABLE, f"{why.strerror}: {why.filename}") from None

    def one(
        self,
        worker: int,
        script: str,
        given: bytes = b"",
        patience: float = 0.0,
        ended: threading.Event | None = None,
        limit: float | None = None,
    ) -> str:
        """What a script says. A worker that cannot be reached is tried again for so many seconds, for fewer
        if it answers that it does not let us in, and no more when `ended` is set. One that has not
        answered within `limit` seconds is not reached either, though it let us in."""
        begin, delay, ended = time.monotonic(), 0.5, ended or threading.Event()
        while True:
            process = self.start(worker, script, stderr=subprocess.PIPE)
            self.live.add(process)
            with process:
                try:
                    out, err = process.communicate(given, limit)
                    code = process.returncode
                except subprocess.TimeoutExpired:
                    process.kill()
                    code, out, err = UNREACHABLE, b"", f"no answer within {limit:g} s".encode()
                except BaseException:  # Ctrl-C: nobody would end it, nor close its pipes
                    process.kill()
                    raise
                finally:
                    self.live.discard(process)
            said = (err or out).decode(errors="replace")
            if reached(code):
                self.reached.add(worker)
            if code == 0:
                return out.decode(errors="replace")
            longest = min(patience, DENIED) if "Permission denied" in said else patience
            if code != UNREACHABLE or time.monotonic() + delay > begin + longest:
                raise Failed(worker, code, said)
            self.trouble(worker, "".join(said.strip().splitlines()[-1:]))
            if ended.wait(delay):
                raise Failed(worker, code, said)
            delay = min(2 * delay, 10)

    def each(
        self, script: str, given: bytes = b"", patience: float = 0.0, limit: float | None = None
    ) -> list[str]:
        """The same on all, at once. An interruption ends all of it."""
        ended = threading.Event()
        with ThreadPoolExecutor(min(64, len(self))) as pool:
            try:
                tasks = [
                    pool.submit(self.one, number, script, given, patience, ended, limit)
                    for number in range(len(self))
                ]
                return [task.result() for task in tasks]
            except BaseException:
                ended.set()
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(self.live):
                    process.kill()
                raise


def reached(code: int) -> bool:
    """Whether that is the word of somebody over there. An ssh of ours that was killed has none."""
    return code >= 0 and code != UNREACHABLE


def by_ssh(addresses: Sequence[str], key: Path | None, known: Path) -> Workers:
    """`known` holds the machines' keys: addresses are used again for others, which ssh would refuse."""
    argv = ssh()
    argv += ["-o", "StrictHostKeyChecking=accept-new", "-o", "LogLevel=ERROR"]
    argv += ["-o", f"UserKnownHostsFile={known}", "-o", f"ConnectTimeout={CONNECT}"]
    argv += ["-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"]
    argv += ["-i", str(key)] if key else []
    places = []
    for address in addresses:
        target = f"{login()}@{address}"
        batch = (*argv, "-o", "BatchMode=yes", target, "--")
        places.append(Place(batch, shell=(*argv, target)))
    return Workers(places)


def login() -> str:
    """The name by which ssh goes to the machines."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose user has a number alone
        raise UserError(
            "user: found no name of the user with this number, expected one for ssh: set USER or LOGNAME"
        ) from None


def ssh() -> list[str]:
    """HEADRACE_SSH is another command to take for ssh, with options of its own."""
    text = os.environ.get("HEADRACE_SSH", "")
    try:
        return shlex.split(text) or ["ssh"]
    except ValueError as why:
        raise UserError(f"HEADRACE_SSH: found {text}, expected a command: {why}") from None


def check_ssh() -> None:
    """Before anything is rented that could not be reached."""
    command = ssh()[0]
    if shutil.which(command) is None:
        raise UserError(
            f"ssh: found no program {command} here, by which the workers are reached; install OpenSSH's "
            "client, or name another by HEADRACE_SSH"
        )


def on_this_machine(addresses: Sequence[str], coordinator: str) -> Workers:
    """An address is a folder, which the worker takes for its home."""
    places = []
    for number, folder in enumerate(addresses):
        env = {"HOME": folder, "HEADRACE_WORKER_PYTHON": sys.executable}
        env["HEADRACE_TIMER_HOMES"] = folder  # other trainings of this machine are none of its business
        if len(addresses) > 1:
            env |= {"HEADRACE_COORDINATOR": coordinator, "HEADRACE_PROCESSES": str(len(addresses))}
            env |= {"HEADRACE_PROCESS": str(number)}
        places.append(Place((), env, remote=False))
    return Workers(places)


def public_key(named: Path | None) -> tuple[Path, str]:
    """The user's key for machines, and its public half as Google wants it. None is ever made here."""
    candidates = [named] if named else [Path.home() / ".ssh" / name for name in KEYS]
    for key in candidates:
        public = key.with_name(key.name + ".pub")
        if public.is_file():
            return key, f"{login()}:{public.read_text().strip()}"
    looked = ", ".join(map(str, candidates))
    raise UserError(
        f"ssh: found no key with a .pub beside it ({looked}); "
        "`ssh-keygen -t ed25519 -f ~/.ssh/google_compute_engine` makes one"
    )
