"""Opens models: from a model's name to its files, its configuration and its weights."""
