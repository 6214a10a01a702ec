"""`python -m m2flow.reasoning` is the command `m2flow-reasoning`."""

import sys

from m2flow.reasoning.cli import main

if __name__ == "__main__":
    sys.exit(main())
