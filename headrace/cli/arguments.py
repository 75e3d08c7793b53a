"""The base of all parsers: the form of help and of errors, and arguments that several commands share."""

import argparse
import difflib
import importlib
import re
import textwrap
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from headrace.errors import ExitCode, UserError

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction["Parser"]
    Action = argparse.Action

Command = Callable[[argparse.Namespace], int | None]  # returns the exit code; None is 0
HELP_WIDTH = 110  # columns at most


class HelpFormatter(argparse.HelpFormatter):
    """The form of help: paragraphs are filled, those with indented lines stay as they are, and a list of
    commands does not begin with their metavar."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._width = min(self._width, HELP_WIDTH)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip("\n").split("\n\n")
        return "\n\n".join(
            paragraph if "\n " in f"\n{paragraph}" else textwrap.fill(" ".join(paragraph.split()), width)
            for paragraph in paragraphs
        )

    def _iter_indented_subactions(self, action: "Action") -> Generator["Action", None, None]:
        if isinstance(action, argparse._SubParsersAction):
            yield from action._get_subactions()

    def _format_action(self, action: "Action") -> str:
        if isinstance(action, argparse._SubParsersAction):
            return "".join(self._format_action(command) for command in action._get_subactions())
        return super()._format_action(action)


class Parser(argparse.ArgumentParser):
    """A parser that raises mistakes as UserError: one line, with the closest valid name."""

    def __init__(self, **options: Any) -> None:  # which ones argparse passes depends on Python's version
        super().__init__(**options, formatter_class=HelpFormatter)
        self._positionals.title = "arguments"

    def error(self, message: str) -> NoReturn:
        """Raise UserError in place of argparse's own exit, with the closest valid choice."""
        if match := re.search(r"invalid choice: '?([^' ]+)'? \(choose from (.+)\)", message):
            valid = match[2].replace("'", "").split(", ")
            closest = difflib.get_close_matches(match[1], valid, n=1)
            message = f"found {match[1]}, expected one of {', '.join(valid)}"
            message += f"; did you mean {closest[0]}?" if closest else ""
        elif message.startswith("unrecognized arguments: -"):
            message += "; settings are given as key=value, e.g. schedule.steps=100"
        raise UserError(f"command line: {message} (see `{self.prog} --help`)")


def add_commands(parser: Parser) -> "Commands":
    """Make a parser choose between commands. Without one, it prints its help."""

    def print_help(args: argparse.Namespace) -> int:
        parser.print_help()
        return ExitCode.USER_ERROR

    parser.set_defaults(command=print_help)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    parser._action_groups.insert(0, parser._action_groups.pop())  # help shows commands before options
    return commands


def add_group(commands: "Commands", name: str, summary: str, epilog: str | None = None) -> "Commands":
    """Add a command that consists of commands."""
    parser = commands.add_parser(name, help=summary, description=to_sentence(summary), epilog=epilog)
    return add_commands(parser)


def add_command(
    commands: "Commands",
    name: str,
    summary: str,
    module: str,
    function: str = "",
    *,
    details: str = "",
    epilog: str | None = None,
) -> Parser:
    """Add a command that runs `function`, by default the one of its own name, in headrace.cli.`module`.

    `details` are paragraphs that its help shows after the summary."""
    description = f"{to_sentence(summary)}\n\n{details}"
    parser = commands.add_parser(name, help=summary, description=description, epilog=epilog)
    parser.set_defaults(command=LazyCommand(module, function or name))
    return parser


@dataclass(frozen=True)
class LazyCommand:
    """The function `name` in headrace.cli.`module`, which is imported when the function is called."""

    module: str
    name: str

    def __call__(self, args: argparse.Namespace) -> int | None:
        command: Command = getattr(importlib.import_module(f"headrace.cli.{self.module}"), self.name)
        return command(args)


def to_sentence(summary: str) -> str:
    """The summary of a command as the sentence that its own --help shows."""
    return summary[0].upper() + summary[1:] + "."


def add_recipe(
    parser: Parser,
    text: str = "YAML file that describes the run",
    example: str = "optimizer.learning_rate=1e-3",
) -> None:
    """Add the arguments RECIPE, with its help text, and KEY=VALUE, with an example."""
    parser.add_argument("recipe", metavar="RECIPE", help=text)
    add_overrides(parser, example=example)


def add_overrides(
    parser: Parser, subject: str = "setting of the recipe", example: str = "optimizer.learning_rate=1e-3"
) -> None:
    """Add the arguments KEY=VALUE."""
    text = f"override a {subject}, e.g. {example}"
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help=text)


def add_run(parser: Parser) -> None:
    """Add the argument RUN and the choice of its weights."""
    parser.add_argument("run", metavar="RUN", help="run folder")
    text = "use the averaged weights (optimizer.ema_decay), or those of the last step (default: the average, "
    text += "if the run has one)"
    parser.add_argument("--ema", action=argparse.BooleanOptionalAction, help=text)
