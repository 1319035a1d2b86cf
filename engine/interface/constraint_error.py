"""The error that the package `constraint` raises if a user asks for a constraint that cannot be
enforced."""


class ConstraintError(ValueError):
    """A constraint that no output can be held to. The message tells the user why and what to do."""
