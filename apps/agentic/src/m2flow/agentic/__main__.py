"""`python -m m2flow.agentic` is the command `m2flow-agentic`."""

import sys

from m2flow.agentic.cli import main

if __name__ == "__main__":
    sys.exit(main())
