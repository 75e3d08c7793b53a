"""The one exception a user may meet: told in a sentence, without a traceback, with exit code 2."""


class UserError(ValueError):
    """A mistake in a recipe, a path or the data, said so that the reader can put it right."""
