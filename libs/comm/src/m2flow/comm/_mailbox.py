"""Messages between two ranks: each waits at its receiver until it is taken, in order for each sender and tag."""

import threading
from collections import deque
from concurrent.futures import Future
from typing import Any

from m2flow.comm._replies import Answer
from m2flow.comm.errors import CommError
from m2flow.comm.payload import Tree

# A sender and a tag.
_Slot = tuple[str, str]


class Mailbox:
    """What has arrived and who waits for it. Thread-safe; nothing blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived: dict[_Slot, deque[tuple[Tree, Future[None]]]] = {}
        self._awaited: dict[_Slot, deque[Future[Tree]]] = {}

    def deliver(self, sender: str, tag: str, tree: Tree) -> "Future[None]":
        """Takes in a message; the future is done when a receiver has it."""
        taken: Future[None] = Future()
        slot = (sender, tag)
        with self._lock:
            receiver = self._next_receiver(slot)
            if receiver is None:
                self._arrived.setdefault(slot, deque()).append((tree, taken))
                return taken
        receiver.set_result(tree)
        taken.set_result(None)
        return taken

    def receive(self, sender: str, tag: str) -> Answer[Tree]:
        """Returns the future of the next message; cancelled, it takes none."""
        receiver: Answer[Tree] = Answer()
        slot = (sender, tag)
        with self._lock:
            waiting = self._arrived.get(slot)
            if waiting is None:
                self._awaited.setdefault(slot, deque()).append(receiver)
                return receiver
            tree, taken = waiting.popleft()
            if not waiting:
                del self._arrived[slot]
        receiver.set_running_or_notify_cancel()
        receiver.set_result(tree)
        if taken.set_running_or_notify_cancel():
            taken.set_result(None)
        return receiver

    def fail(self, sender: str, error: CommError) -> None:
        """Fails those who wait for a sender that is gone; what it had delivered stays."""
        with self._lock:
            slots = [slot for slot in self._awaited if slot[0] == sender]
            receivers = [receiver for slot in slots for receiver in self._awaited.pop(slot)]
        for receiver in receivers:
            if receiver.set_running_or_notify_cancel():
                receiver.set_exception(error)

    def num_states(self) -> int:
        """Returns how many senders and tags are remembered."""
        with self._lock:
            return len(self._arrived) + len(self._awaited)

    def _next_receiver(self, slot: _Slot) -> "Future[Any] | None":
        receivers = self._awaited.get(slot)
        while receivers:
            receiver = receivers.popleft()
            if not receivers:
                del self._awaited[slot]
            if receiver.set_running_or_notify_cancel():
                return receiver
        return None
