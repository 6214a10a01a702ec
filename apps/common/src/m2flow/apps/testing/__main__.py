"""The command line of the toy app."""

import sys

from m2flow.apps.cli import run_command
from m2flow.apps.testing.toy import TOY

if __name__ == "__main__":
    sys.exit(run_command(TOY))
