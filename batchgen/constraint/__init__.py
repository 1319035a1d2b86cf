"""Each row's constraint, and the check of finished text against it."""
