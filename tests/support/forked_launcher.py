"""Launcher processes forked from a process that has imported everything: importing Google's client takes
longer than most of the tests.

`start` returns an object like `subprocess.Popen`, with standard output and errors in a single text pipe."""

import atexit
import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]


class LauncherProcess:
    """A forked process with the part of the `Popen` interface that the tests use."""

    def __init__(self, pid: int, stdout: IO[str], status: int) -> None:
        self.pid, self.stdout, self.status = pid, stdout, status
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None and select.select([self.status], [], [], 0)[0]:
            self.returncode = int(os.read(self.status, 100) or b"-9")
            os.close(self.status)
        return self.returncode

    def wait(self, timeout: float = 600.0) -> int:
        """Wait for the exit code."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise subprocess.TimeoutExpired("launcher", timeout)
            select.select([self.status], [], [], remaining)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        with contextlib.suppress(ProcessLookupError):
            self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 600.0) -> tuple[str, None]:
        """Return all output up to the end of the process."""
        deadline, pieces = time.monotonic() + timeout, []
        while select.select([self.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            piece = self.stdout.buffer.read1(65536)
            if not piece:
                self.stdout.close()
                self.wait(max(1.0, deadline - time.monotonic()))
                return b"".join(pieces).decode(errors="replace"), None
            pieces.append(piece)
        raise subprocess.TimeoutExpired("launcher", timeout)


class ForkServer:
    """The process that forks launchers; ends with the test process."""

    def __init__(self) -> None:
        self.connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.support.forked_launcher", str(other.fileno())]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, env=env, cwd=ROOT, pass_fds=[other.fileno()])
        other.close()
        atexit.register(self.close)

    def close(self) -> None:
        """End the server."""
        self.connection.close()
        self.process.wait(10)

    def start(self, code: str, argv: list[str], env: dict[str, str], cwd: Path) -> LauncherProcess:
        """Fork a process that runs `code`, and then `headrace` with these arguments."""
        output_read, output_write = os.pipe()
        status_read, status_write = os.pipe()
        message = json.dumps(dict(code=code, argv=argv, env=env, cwd=str(cwd))).encode()
        socket.send_fds(self.connection, [message], [output_write, status_write])
        os.close(output_write)
        os.close(status_write)
        pid = int(os.read(status_read, 100))
        return LauncherProcess(pid, open(output_read, encoding="utf-8", errors="replace"), status_read)


def serve(descriptor: int) -> None:
    """Fork a process for every message until the connection is closed."""
    for name in ("cli.main", "cli.tpu", "cli.tpu_disk", "config.reader", "config.recipe", "tpu.gcp"):
        importlib.import_module(f"headrace.{name}")
    for name in ("cloud.tpu_v2", "auth.transport.requests", "api_core.retry", "protobuf.json_format"):
        importlib.import_module(f"google.{name}")
    signal.signal(signal.SIGCHLD, reap)
    connection = socket.socket(fileno=descriptor)
    while True:
        message, (output, status), *_ = socket.recv_fds(connection, 1 << 20, 2) or (b"", [])
        if not message:
            return
        if os.fork() == 0:
            connection.close()
            wait_for_launcher(json.loads(message), output, status)
        os.close(output)
        os.close(status)


def reap(*_: object) -> None:
    """Wait for the children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def wait_for_launcher(message: dict, output: int, status: int) -> None:
    """Fork the launcher, and write its number and its exit code to `status`. Returns in the launcher only."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        os.close(output)
        os.write(status, str(pid).encode())
        _, code = os.waitpid(pid, 0)
        os.write(status, str(os.waitstatus_to_exitcode(code)).encode())
        os._exit(0)
    os.close(status)
    run(message, output)


def run(message: dict, output: int) -> None:
    """Run the launcher in this process."""
    from headrace.cli.main import main
    from headrace.tpu import timeouts

    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(message["cwd"])
    os.environ.clear()
    os.environ.update(message["env"])
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)  # stdout of the server may be a file
    if "PYTHONUNBUFFERED" in os.environ:
        sys.stdout.reconfigure(write_through=True)
    importlib.reload(timeouts)
    exec(message["code"], {})
    sys.argv = ["headrace", *message["argv"]]
    sys.exit(main())


server: list[ForkServer] = []


def start(code: str, argv: list[str], env: dict[str, str], cwd: Path) -> LauncherProcess:
    """Start a launcher in a forked process; see `ForkServer.start`."""
    if not server:
        server.append(ForkServer())
    return server[0].start(code, argv, env, cwd)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
