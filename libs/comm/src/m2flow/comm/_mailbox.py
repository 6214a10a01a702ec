"""Messages between two ranks: each waits at its receiver until it is taken, in order for each sender and tag."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from m2flow.comm._replies import Answer
from m2flow.comm.errors import CommError
from m2flow.comm.payload import Tree

# A sender and a tag.
_Slot = tuple[str, str]
# What a message costs beside its payload, about: its futures, and its place here.
_MESSAGE_BYTES = 2 << 10


class _Mail(NamedTuple):
    tree: Tree
    held_bytes: int
    taken: "Future[None]"


class _Receiver(Answer[Tree]):
    """Who waits for a message: cancelled, it takes none."""

    def __init__(self, withdraw: "Callable[[Future[Tree]], None]") -> None:
        super().__init__()
        self._withdraw = withdraw

    def cancel(self) -> bool:
        """Like Future's."""
        cancelled = super().cancel()
        if cancelled:
            self._withdraw(self)
        return cancelled


class Mailbox:
    """What has arrived, at most `limit_bytes` that nobody receives, and who waits. Thread-safe; nothing blocks."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._waiting_bytes = 0
        self._closed: CommError | None = None
        self._lock = threading.Lock()
        self._arrived: dict[_Slot, deque[_Mail]] = {}
        self._awaited: dict[_Slot, deque[Future[Tree]]] = {}

    def deliver(self, sender: str, tag: str, tree: Tree, held_bytes: int = 0) -> "Future[None] | None":
        """Takes in a message that keeps so many bytes of this process; the future is done when a receiver has it.

        It fails with CommError where the mailbox is full, and with what `close` says. None: a receiver has it now.
        """
        slot = (sender, tag)
        with self._lock:
            receiver = self._next_receiver(slot)
            if receiver is None:
                return self._keep(slot, tree, held_bytes + _MESSAGE_BYTES)
        receiver.set_result(tree)
        return None

    def receive(self, sender: str, tag: str) -> Answer[Tree]:
        """Returns the future of the next message; cancelled, it takes none."""
        slot = (sender, tag)
        receiver = _Receiver(partial(self._withdraw, slot))
        with self._lock:
            waiting = self._arrived.get(slot)
            if waiting is None:
                self._awaited.setdefault(slot, deque()).append(receiver)
                return receiver
            tree, held_bytes, taken = waiting.popleft()
            self._waiting_bytes -= held_bytes
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

    def close(self, error: CommError) -> None:
        """Fails the senders of what nobody has received, and of what is yet to come."""
        with self._lock:
            self._closed = error
            dropped = [mail for waiting in self._arrived.values() for mail in waiting]
            self._arrived.clear()
            self._waiting_bytes = 0
        for mail in dropped:
            if mail.taken.set_running_or_notify_cancel():
                mail.taken.set_exception(error)

    def num_states(self) -> int:
        """Returns how many senders and tags are remembered."""
        with self._lock:
            return len(self._arrived) + len(self._awaited)

    def _keep(self, slot: _Slot, tree: Tree, held_bytes: int) -> "Future[None]":
        taken: Answer[None] = Answer()
        refusal = self._refusal(slot, held_bytes)
        if refusal is None:
            self._arrived.setdefault(slot, deque()).append(_Mail(tree, held_bytes, taken))
            self._waiting_bytes += held_bytes
        else:
            taken.set_exception(refusal)
        return taken

    def _refusal(self, slot: _Slot, held_bytes: int) -> CommError | None:
        limit = self._limit_bytes
        if self._closed is not None or limit is None or self._waiting_bytes + held_bytes <= limit:
            return self._closed
        sender, tag = slot
        return CommError(
            f"got a message of {sender!r}, tag {tag!r}, beside {self._waiting_bytes} bytes that nobody has received, "
            f"want at most the quota of {limit}: receive them, or raise it"
        )

    def _withdraw(self, slot: _Slot, receiver: "Future[Tree]") -> None:
        """Forgets a receiver that was cancelled."""
        with self._lock:
            receivers = self._awaited.get(slot)
            if receivers is not None and receiver in receivers:
                receivers.remove(receiver)
                if not receivers:
                    del self._awaited[slot]

    def _next_receiver(self, slot: _Slot) -> "Future[Any] | None":
        receivers = self._awaited.get(slot)
        while receivers:
            receiver = receivers.popleft()
            if not receivers:
                del self._awaited[slot]
            if receiver.set_running_or_notify_cancel():
                return receiver
        return None
