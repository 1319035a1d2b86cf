"""Hydra reads the yaml files of this package (`pkg://batchgen.conf`)."""
