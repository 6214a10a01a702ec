"""A module that a probe preloads: it notes which process has imported it."""

import os

IMPORTED_BY = os.getpid()
