"""The command line of the toy app."""

import sys

from m2flow.apps.entry import run_app

if __name__ == "__main__":
    sys.exit(run_app("m2flow.apps.testing.toy:TOY"))
