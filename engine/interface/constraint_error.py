"""The error that the package `constraint` raises for a constraint that cannot be enforced."""


class ConstraintError(ValueError):
    """A constraint that cannot be enforced. The message says why, and what the user can do."""
