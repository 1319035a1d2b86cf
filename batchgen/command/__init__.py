"""The command line: its arguments, its help, sweeps, and the verbs that work on folders of jobs."""
