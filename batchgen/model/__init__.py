"""From the name of a model to its files, its configuration and its weights."""
