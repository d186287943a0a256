"""`python -m planner`: the same as the command `planner`."""

import sys

from planner.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
