"""Ctrl-C and SIGTERM end a run once, in order: the first one raises, further ones no longer disturb the clean-up."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

__all__ = ["Terminated", "orderly_interrupts"]


class Terminated(KeyboardInterrupt):
    """SIGTERM, handled as Ctrl-C is."""


@contextlib.contextmanager
def orderly_interrupts() -> Iterator[None]:
    """Within the block the first SIGINT raises KeyboardInterrupt, the first SIGTERM Terminated; later ones do nothing.

    For the main thread. The handlers from before are back after the block.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
