"""The entry point of `headrace`: run a command, and turn errors into messages and exit codes."""

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
from headrace.errors import ExitCode, InvalidArgument, UserError
from headrace.storage import redact


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `argv`, or that of the command line if it is None, and return the exit code.

    With None the process is taken to end with the command: the trainer may then restart itself, and a second
    Ctrl-C need not wait for unfinished saves."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # letters that the terminal lacks are printed by their codes
        sys.stdout.reconfigure(errors="backslashreplace")
    if argv is None:
        sys.excepthook = redact.excepthook
    try:
        args = parse(argv)
        args.owns_process = argv is None
        hide_libtpu_without_devices()
        code = args.command(args) or ExitCode.DONE
        sys.stdout.flush()
        return code
    except UserError as error:
        text = error.as_option if isinstance(error, InvalidArgument) else str(error)
        message = f"headrace: {redact.redact(text)}"
        # A message may quote input that is not valid text.
        print(message.encode("utf-8", "backslashreplace").decode(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("headrace: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # `headrace ... | head`: without this, Python reports it again when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.BROKEN_PIPE
    except OSError as error:
        if not error.filename and error.errno != errno.ENOSPC:
            raise
        print(f"headrace: {error.filename or 'cannot write'}: {error.strerror}", file=sys.stderr)
        return ExitCode.USER_ERROR


def hide_libtpu_without_devices() -> None:
    """Let JAX use the CPU on a machine that has libtpu, for `plan`, but neither a TPU nor a GPU.

    JAX would load libtpu, which prints errors about the missing TPU and may crash the profiler."""
    has_devices = any(glob.glob(pattern) for pattern in ("/dev/accel*", "/dev/vfio/[0-9]*"))
    other_platforms = importlib.metadata.entry_points(group="jax_plugins")
    if importlib.util.find_spec("libtpu") and not has_devices and not other_platforms:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Settings may also come after options, which argparse does not expect."""
    top_parser = parser.make_parser()
    args, remainder = top_parser.parse_known_args(argv)
    if remainder[:1] == ["--"] and "words" in args:
        args.words, remainder = remainder[1:], []
    if remainder:
        if "overrides" not in args or not all("=" in item and item[0] != "-" for item in remainder):
            top_parser.error(f"unrecognized arguments: {' '.join(remainder)}")
        args.overrides += remainder
    return args


if __name__ == "__main__":
    sys.exit(main())
