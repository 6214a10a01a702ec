"""`python -m m2flow.embodied` is the command `m2flow-embodied`."""

import sys

from m2flow.embodied.cli import main

if __name__ == "__main__":
    sys.exit(main())
