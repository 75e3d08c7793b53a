"""The command line: what was typed goes to one function of commands.py, and what goes wrong is told."""

import argparse
import errno
import glob
import importlib.metadata
import importlib.util
import io
import os
import sys
from collections.abc import Sequence

from headrace.cli import parser
from headrace.errors import ExitCode, UserError
from headrace.storage import redact


def main(argv: Sequence[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that lacks a letter shows its number
        sys.stdout.reconfigure(errors="backslashreplace")
    if argv is None:
        sys.excepthook = redact.excepthook
    try:
        args = parse(argv)
        args.is_program = argv is None
        hide_libtpu_without_devices()
        code = args.command(args) or 0
        sys.stdout.flush()
        return code
    except UserError as error:
        said = f"headrace: {redact.redact(str(error))}"  # with whatever was found, be it no letter at all
        print(said.encode("utf-8", "backslashreplace").decode(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("headrace: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # `headrace ... | head`: Python would complain once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.BROKEN_PIPE
    except OSError as error:  # a folder that cannot be written, a full disk
        if not error.filename and error.errno != errno.ENOSPC:
            raise
        print(f"headrace: {error.filename or 'what was to be written'}: {error.strerror}", file=sys.stderr)
        return ExitCode.USER_ERROR


def hide_libtpu_without_devices() -> None:
    """On a machine that has libtpu for `plan` but neither a TPU nor a GPU, JAX would load it all the same: it
    complains of what it does not find, and may bring down a profile."""
    devices = any(glob.glob(pattern) for pattern in ("/dev/accel*", "/dev/vfio/[0-9]*"))
    others = importlib.metadata.entry_points(group="jax_plugins")
    if importlib.util.find_spec("libtpu") and not devices and not others:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Settings may come after options too, which argparse does not expect."""
    top = parser.parser()
    args, rest = top.parse_known_args(argv)
    if rest[:1] == ["--"] and hasattr(args, "words"):
        args.words, rest = rest[1:], []
    if rest and not (hasattr(args, "overrides") and all("=" in item and item[0] != "-" for item in rest)):
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides += rest
    return args


if __name__ == "__main__":
    sys.exit(main())
