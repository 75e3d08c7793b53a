"""Exit codes, and the errors that a user sees: one sentence without a traceback, and an exit code."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `headrace`.

    The supervisor restarts the trainer after UNREACHABLE, HUNG, MACHINE_FAULT and LOST_HOST."""

    DONE = 0
    FAILED = 1  # an unexpected error, or training that cannot continue
    USER_ERROR = 2  # in a recipe, a path, an option or the data
    DOES_NOT_FIT = 3
    UNREACHABLE = 74  # a server did not respond
    PREEMPTED = 75  # stopped by a signal, after saving; the same command resumes
    HUNG = 76  # a step exceeded its timeout
    MACHINE_FAULT = 77
    LOST_HOST = 78
    INTERRUPTED = 130  # Ctrl-C, as shells report it
    BROKEN_PIPE = 141  # as if ended by SIGPIPE


class UserError(ValueError):
    """A mistake in a recipe, a path, an option or the data. The message says how to correct it.

    `exit_code` is the exit code with which the command line ends.

    Example:
        >>> try:
        ...     recipe = hr.load_recipe("recipe.yaml")
        ... except hr.UserError as error:
        ...     print(error)
    """

    exit_code: int = ExitCode.USER_ERROR


class InvalidArgument(UserError):
    """An argument of a function of the API that has no valid value, or does not go with the others.

    The command line reports it as the option of the same name: `--top-k` for `top_k`."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(name, problem)
        self.name, self.problem = name, problem

    def __str__(self) -> str:
        return f"{self.name}: {self.problem}"

    @property
    def as_option(self) -> str:
        """The message with the name of the option."""
        return f"--{self.name.replace('_', '-')}: {self.problem}"


class DoesNotFit(UserError):
    """A valid recipe that needs more memory than these devices have. The message says what to change.

    Example:
        >>> try:
        ...     hr.train(recipe)
        ... except hr.DoesNotFit:
        ...     hr.train(dataclasses.replace(recipe, batch=smaller_batch))
    """

    exit_code = ExitCode.DOES_NOT_FIT


class Unreachable(UserError):
    """A server that did not respond to any of several attempts. Trying again later may work."""

    exit_code = ExitCode.UNREACHABLE
