"""`python -m tests.support.kills`: kill the processes of a job, see `check_kills`."""

from tests.support.kills.check_kills import main

if __name__ == "__main__":
    main()
