"""A worker's class with all that its ranks need of other modules: what a zygote imports once, for all that it forks."""

import threading
from importlib import import_module

from m2flow.worker.base import Worker
from m2flow.worker.target import resolve_target

# Ranks that are threads start together, and not every package bears to be imported by two at once.
_IMPORTING = threading.Lock()


def warm_class(target: str) -> type[Worker]:
    """Imports the class that `target` names, and the modules of its `preload`. Raises what they raise. Blocks."""
    with _IMPORTING:
        worker: type[Worker] = resolve_target(target)
        for module in worker.preload:
            import_module(module)
    return worker
