"""The package of the Hydra configuration files (`pkg://batchgen.conf`). It has no code."""
