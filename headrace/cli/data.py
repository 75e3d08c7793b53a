"""`headrace data`: the stages of the data pipeline, and a look at what they made."""

import argparse

from headrace import api


def prepare(args: argparse.Namespace) -> None:
    """Run the stages up to the one of the command, and print their progress."""
    api.prepare_data(args.recipe, args.overrides, until=args.until, replace=args.replace, report=print)


def inspect(args: argparse.Namespace) -> None:
    """Print some sequences, or documents if nothing is packed yet."""
    from headrace.data.inspect import inspect

    inspect(args.folder, split=args.split, rows=args.rows, seed=args.seed)


def verify(args: argparse.Namespace) -> None:
    """Check packed data, and print the result."""
    from headrace.data.verify import verify

    verify(args.folder, print)
