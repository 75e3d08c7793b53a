"""`headrace train`."""

import argparse

from headrace import api
from headrace.checkpoint import inventory
from headrace.errors import UserError
from headrace.runtime import malloc, supervisor


def train(args: argparse.Namespace) -> int:
    """Train a recipe, or resume its run. Returns the exit code.

    As a program without --once, this process supervises another one, which trains."""
    recipe = api.load_recipe(args.recipe, args.overrides)
    if args.program is not None and not args.program.is_dir():
        raise UserError(f"--program: no such folder: {args.program}")
    if args.owns_process and not args.once:
        return supervisor.Supervisor(recipe.run_dir, inventory.newest_sealed_step).watch()
    supervisor.die_with_parent()
    malloc.use_one_arena()  # before JAX is imported, which starts threads and ends some

    from headrace.runtime import multihost

    with multihost.exit_codes(owns_process=args.owns_process):
        return api.train(recipe, program_dir=args.program, owns_process=args.owns_process).exit_code
