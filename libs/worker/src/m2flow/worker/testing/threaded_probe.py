"""A probe whose module starts a thread when it is imported, as some libraries do: it cannot be forked warm."""

import threading

from m2flow.worker.testing.probe import Probe

_FOREVER = threading.Event()
threading.Thread(target=_FOREVER.wait, name="of an import", daemon=True).start()


class ThreadedProbe(Probe):
    """A probe like any other."""
