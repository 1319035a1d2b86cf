"""The error that this package raises for a user's mistake."""


class ConstraintError(ValueError):
    """A constraint that no output can be held to. The message tells the user why and what to do."""
