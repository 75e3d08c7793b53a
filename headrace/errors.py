"""The exceptions a user may meet: told in a sentence, without a traceback, each with an exit code."""


class UserError(ValueError):
    """A mistake in a recipe, a path or the data, said so that the reader can put it right."""

    code = 2


class DoesNotFit(UserError):
    """Right as it is, but too large for the memory of these devices."""

    code = 3


class Unreachable(UserError):
    """A server that did not answer, however often it was asked: to try again later may help."""

    code = 74
