"""The launcher's terminal: log lines, a status line, and the signals that ask it to stop."""

import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType


class Console:
    """Output of one command, and what signals mean to it at the moment."""

    def __init__(self) -> None:
        self.stop_requests = 0  # signals received
        self.finish_gracefully = False  # a signal is counted for the main loop, not raised at once
        self.detach_on_hangup = True  # when the terminal is closed, end at once and leave the job running
        self.last_status = ""

    def print_line(self, line: str) -> None:
        """Print a line in place of the status."""
        self.show_status("")
        self.write(line)

    def write(self, text: str, end: str = "\n") -> None:
        """Print text. A closed pipe, as with `| head`, counts as a signal to stop: training saves and the
        slice is deleted. A full disk does not."""
        try:
            print(text, end=end, flush=True)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self.handle_signal(signal.SIGPIPE, None)

    def log(self, message: str) -> None:
        """Print a message after the time of day."""
        self.print_line(f"{time.strftime('%H:%M:%S')} {message}")

    def show_status(self, status: str, detail: str = "") -> None:
        """Show what the launcher waits for: in place on a terminal, otherwise as a line when `status`
        changes. `detail`, such as a duration, is shown only in place. An empty status clears it."""
        if sys.stdout.isatty():
            self.write(f"\r\x1b[K{status}{detail}", end="" if status else "\r")
        elif status and status != self.last_status:
            self.write(f"{time.strftime('%H:%M:%S')} {status}")
        self.last_status = status or self.last_status

    @contextlib.contextmanager
    def signal_handlers(self) -> Iterator[None]:
        """Handle SIGINT, SIGTERM and SIGHUP inside this context. Under `nohup` SIGHUP stays ignored."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            numbers.append(signal.SIGHUP)
        previous = {number: signal.signal(number, self.handle_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Count a signal; raise KeyboardInterrupt unless `finish_gracefully` is set.

        A closed terminal (SIGHUP) ends this process at once while `detach_on_hangup` is set: the job
        continues on the slice. While it already stops gracefully, only SIGINT and SIGTERM count again."""
        if number == signal.SIGHUP and self.detach_on_hangup:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if self.stop_requests and self.finish_gracefully and number not in (signal.SIGINT, signal.SIGTERM):
            return
        self.stop_requests += 1
        self.detach_on_hangup = False
        if not self.finish_gracefully:
            raise KeyboardInterrupt
        print_quietly(print_error, f"\nheadrace: received {signal.Signals(number).name}; please wait")


def print_quietly(print_function: Callable[[str], None], text: str) -> None:
    """Print, and ignore that the output is closed."""
    with contextlib.suppress(OSError, ValueError):  # closed at the other end, or here
        print_function(text)


def print_error(text: str) -> None:
    """Print a line to standard error."""
    print(text, file=sys.stderr, flush=True)
