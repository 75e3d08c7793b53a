"""The machines of a slice as places where bash scripts run: over ssh, or as processes of this machine.

Secrets are passed on standard input, never on a command line or in a file."""

import getpass
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from headrace.errors import UserError
from headrace.tpu import clock, timeouts

UNREACHABLE = 255  # exit code of ssh itself
KEY_FILES = ("google_compute_engine", "id_ed25519", "id_rsa")  # in ~/.ssh; the first is gcloud's


class WorkerFailed(UserError):
    """A script failed on a worker, or the worker could not be reached (`worker_exit_code` is
    `UNREACHABLE`)."""

    exit_code = 1

    def __init__(self, worker: int, worker_exit_code: int, output: str) -> None:
        """`output` is what the script or ssh printed; its last lines become part of the message."""
        last_lines = " | ".join(output.strip().splitlines()[-3:])
        super().__init__(f"[w{worker}] exit code {worker_exit_code}: {last_lines}"[:600])
        self.worker_exit_code, self.output = worker_exit_code, last_lines


@dataclass(frozen=True)
class WorkerAddress:
    """The command that runs a script on one worker."""

    argv: tuple[str, ...]  # before the script, which a shell on the worker reads as one argument
    env: Mapping[str, str] = field(default_factory=dict)  # of the local process
    is_remote: bool = True
    shell: tuple[str, ...] = ("bash",)  # command of an interactive shell

    def command(self, script: str) -> list[str]:
        """The local command that runs a bash script on the worker."""
        if self.is_remote:  # a login shell on the worker parses what ssh is given
            return [*self.argv, f"bash -c {shlex.quote(script)}"]
        return [*self.argv, "bash", "-c", script]


class Workers:
    """The workers of a slice, by number."""

    def __init__(self, addresses: Sequence[WorkerAddress]) -> None:
        self.addresses = list(addresses)
        self.processes: set[subprocess.Popen[bytes]] = set()  # local ones that run a script now
        self.reached: set[int] = set()  # workers that have answered at least once
        self.on_retry: Callable[[int, str], None] = lambda worker, error: None

    def __len__(self) -> int:
        return len(self.addresses)

    def start_script(
        self, worker: int, script: str, stderr: int = subprocess.STDOUT
    ) -> subprocess.Popen[bytes]:
        """Start a script on a worker, and return the local process that stands for it, with pipes for
        standard input and output."""
        address = self.addresses[worker]
        try:
            return subprocess.Popen(
                address.command(script),
                env=os.environ | address.env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,  # Ctrl-C is for the launcher only
            )
        except OSError as error:  # no ssh program, no memory: this says nothing about the worker
            raise WorkerFailed(worker, UNREACHABLE, f"{error.strerror}: {error.filename}") from None

    def run_on(
        self,
        worker: int,
        script: str,
        stdin: bytes = b"",
        *,
        retry_seconds: float = 0.0,
        cancel: threading.Event | None = None,
        timeout: float | None = None,
    ) -> str:
        """Run a script on one worker and return its standard output. Raises WorkerFailed.

        A worker that cannot be reached is tried again for `retry_seconds`, for `AUTH_RETRY` at most if it
        refuses the key, and no longer once `cancel` is set. One that has not answered within `timeout`
        seconds counts as not reached."""
        started_at, delay, cancel = clock.monotonic(), 0.5, cancel or threading.Event()
        while True:
            code, out, err = self.run_once(worker, script, stdin, timeout)
            output = (err or out).decode(errors="replace")
            if was_reached(code):
                self.reached.add(worker)
            if code == 0:
                return out.decode(errors="replace")
            is_denied = "Permission denied" in output
            limit = min(retry_seconds, timeouts.AUTH_RETRY) if is_denied else retry_seconds
            if code != UNREACHABLE or clock.monotonic() + delay > started_at + limit:
                raise WorkerFailed(worker, code, output)
            self.on_retry(worker, "".join(output.strip().splitlines()[-1:]))
            if cancel.wait(delay):
                raise WorkerFailed(worker, code, output)
            delay = min(2 * delay, 10)

    def run_once(
        self, worker: int, script: str, stdin: bytes, timeout: float | None
    ) -> tuple[int, bytes, bytes]:
        """Run a script on one worker; return exit code, output and errors. After `timeout` seconds, or when
        this thread is interrupted, the local process is killed."""
        process = self.start_script(worker, script, stderr=subprocess.PIPE)
        self.processes.add(process)
        with process:
            try:
                out, err = process.communicate(stdin, timeout)
                return process.returncode, out, err
            except subprocess.TimeoutExpired:
                process.kill()
                return UNREACHABLE, b"", f"no answer within {timeout:g} s".encode()
            except BaseException:  # Ctrl-C: the process has a session of its own and would not end
                process.kill()
                raise
            finally:
                self.processes.discard(process)

    def run_on_all(
        self, script: str, stdin: bytes = b"", *, retry_seconds: float = 0.0, timeout: float | None = None
    ) -> list[str]:
        """Run a script on all workers at once, and return their outputs in order of worker number.

        The first failure or an interruption ends all of them and is raised."""
        cancel = threading.Event()

        def run(worker: int) -> str:
            return self.run_on(
                worker, script, stdin, retry_seconds=retry_seconds, cancel=cancel, timeout=timeout
            )

        with ThreadPoolExecutor(min(64, len(self))) as pool:
            try:
                tasks = [pool.submit(run, worker) for worker in range(len(self))]
                return [task.result() for task in tasks]
            except BaseException:
                cancel.set()
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(self.processes):
                    process.kill()
                raise


def was_reached(exit_code: int) -> bool:
    """Whether an exit code comes from the worker. A negative one is that of a local ssh that was killed."""
    return exit_code >= 0 and exit_code != UNREACHABLE


def ssh_workers(addresses: Sequence[str], key: Path | None, known_hosts: Path) -> Workers:
    """Workers that are reached over ssh at these addresses.

    `known_hosts` must be a file of this slice: Google reuses addresses, and ssh would refuse a new host
    key."""
    argv = ssh_command()
    argv += ["-o", "StrictHostKeyChecking=accept-new", "-o", "LogLevel=ERROR"]
    argv += ["-o", f"UserKnownHostsFile={known_hosts}", "-o", f"ConnectTimeout={timeouts.SSH_CONNECT:.0f}"]
    argv += ["-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"]
    argv += ["-i", str(key)] if key else []
    workers = []
    for address in addresses:
        target = f"{login_name()}@{address}"
        workers.append(WorkerAddress((*argv, "-o", "BatchMode=yes", target, "--"), shell=(*argv, target)))
    return Workers(workers)


def login_name() -> str:
    """The user name for ssh. Raises UserError if the user has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container whose user is only a number
        raise UserError(
            "user: found no name of the user with this number, expected one for ssh: set USER or LOGNAME"
        ) from None


def ssh_command() -> list[str]:
    """The ssh program with its options. HEADRACE_SSH replaces it."""
    text = os.environ.get("HEADRACE_SSH", "")
    try:
        return shlex.split(text) or ["ssh"]
    except ValueError as error:
        raise UserError(f"HEADRACE_SSH: found {text}, expected a command: {error}") from None


def check_ssh() -> None:
    """Raise UserError if there is no ssh program. Called before a slice is rented that could not be
    reached."""
    program = ssh_command()[0]
    if shutil.which(program) is None:
        raise UserError(
            f"ssh: found no program {program} on this machine, expected one to reach the workers; install "
            "OpenSSH's client, or name another with HEADRACE_SSH"
        )


def local_workers(folders: Sequence[str], coordinator: str) -> Workers:
    """Workers that are processes of this machine, each with a folder as its home."""
    workers = []
    for number, folder in enumerate(folders):
        env = {"HOME": folder, "HEADRACE_WORKER_PYTHON": sys.executable}
        env["HEADRACE_TIMER_HOMES"] = folder  # or the timer would count other jobs of this machine
        if len(folders) > 1:
            env |= {"HEADRACE_COORDINATOR": coordinator, "HEADRACE_PROCESSES": str(len(folders))}
            env |= {"HEADRACE_PROCESS": str(number)}
        workers.append(WorkerAddress((), env, is_remote=False))
    return Workers(workers)


def find_public_key(option: Path | None) -> tuple[Path, str]:
    """The user's private key file for ssh and its public half as Google expects it (USER:KEY).

    `option` names a key, otherwise the usual ones are tried. Raises UserError if there is none; no key is
    ever created here."""
    candidates = [option] if option else [Path.home() / ".ssh" / name for name in KEY_FILES]
    for key in candidates:
        public = key.with_name(key.name + ".pub")
        if public.is_file():
            return key, f"{login_name()}:{public.read_text().strip()}"
    searched = ", ".join(map(str, candidates))
    raise UserError(
        f"ssh: found no key with a .pub file next to it ({searched}); "
        "`ssh-keygen -t ed25519 -f ~/.ssh/google_compute_engine` makes one"
    )
