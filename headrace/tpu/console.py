"""What the launcher says while it works, and what it hears meanwhile: Ctrl-C, SIGTERM, and that nobody reads
it any more."""

import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any


class Voice:
    def __init__(self) -> None:
        self.asked = 0  # how often it was asked to end
        self.gentle = False  # whether that is a wish that somebody looks at, and not an end at once
        self.alone = True  # whether what is at work goes on without us, when the terminal is closed
        self.shown = ""

    def put(self, line: str) -> None:
        self.show("")
        self.print(line)

    def print(self, words: str, end: str = "\n") -> None:
        """Where nobody listens any more (`| head`), it ends as by Ctrl-C: saved, and given back. A file that
        has no room for it is none who listened."""
        try:
            print(words, end=end, flush=True)
        except OSError as why:
            if why.errno in (errno.ENOSPC, errno.EDQUOT):
                return
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self.ask(signal.SIGPIPE, None)

    def say(self, words: str) -> None:
        self.put(f"{time.strftime('%H:%M:%S')} {words}")

    def show(self, words: str, more: str = "") -> None:
        """What is waited for: in place on a terminal, else a line whenever it changes."""
        if sys.stdout.isatty():
            self.print(f"\r\x1b[K{words}{more}", end="" if words else "\r")
        elif words and words != self.shown:
            self.print(f"{time.strftime('%H:%M:%S')} {words}")
        self.shown = words or self.shown

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # and not `nohup`
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self.ask) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def ask(self, number: int, frame: Any) -> None:
        """While it trains, a wish that the loop sees; before that, an end; while it deletes, nothing. A
        terminal that is closed ends who waits in the queue, and leaves a slice with its job alone, unless
        that was to end already."""
        if number == signal.SIGHUP and self.alone:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if self.asked and self.gentle and number not in (signal.SIGINT, signal.SIGTERM):
            return  # it ends already, and nobody is in a hurry because no terminal is there
        self.asked += 1
        self.alone = False
        if not self.gentle:
            raise KeyboardInterrupt
        whisper(complain, f"\nheadrace: {signal.Signals(number).name} heard; please wait")


def whisper(say: Callable[[str], None], words: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a pipe that is closed at its other end, or here
        say(words)


def complain(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
