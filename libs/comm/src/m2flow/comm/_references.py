"""What is handed over inside this process: a number stands for each, as a block stands for bytes.

A number is found for as long as what it stands for lives: whoever asks to put that keeps it, then the channel that it
waits in. Nobody has to take it back, whatever fails on the way.
"""

import itertools
import os
import weakref
from collections.abc import Callable

from m2flow.comm._connection import Connection
from m2flow.comm.errors import CommError
from m2flow.comm.payload import Tree
from m2flow.proto.comm.v1 import comm_pb2

# In place of a segment's id: random, so that no other process means it.
_SEGMENT = int.from_bytes(os.urandom(8), "little")
_numbers = itertools.count(1)

Decode = Callable[[Tree], Tree]
_held: "weakref.WeakValueDictionary[int, Referable]" = weakref.WeakValueDictionary()


class Referable:
    """What a number can stand for, once it is asked for one."""

    __slots__ = ("__weakref__", "_number")

    _number: comm_pb2.Block

    @property
    def number(self) -> comm_pb2.Block:
        """The number, as the block that it takes the place of."""
        try:
            return self._number
        except AttributeError:
            self._number = comm_pb2.Block(segment=_SEGMENT, offset_bytes=next(_numbers))
            _held[self._number.offset_bytes] = self
            return self._number

    def taken_by(self, reader: Connection, decode: Decode) -> tuple[Tree, Decode | None]:
        """Returns what a reader is handed, and `decode` where that is a payload's bytes. Raises CommError as `open`."""
        raise NotImplementedError


class Reference(Referable):
    """One object; whoever holds this keeps it."""

    __slots__ = ("tree",)

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def taken_by(self, reader: Connection, decode: Decode) -> tuple[Tree, None]:
        """Returns the object itself."""
        return self.tree, None


def is_reference(block: comm_pb2.Block) -> bool:
    """Says whether a block stands for something of this process."""
    return block.segment == _SEGMENT


def referenced(block: comm_pb2.Block) -> Referable:
    """Returns what a block stands for; raises CommError where nobody holds it any more."""
    found = _held.get(block.offset_bytes)
    if found is None:
        raise gone(block)
    return found


def gone(block: comm_pb2.Block) -> CommError:
    """Returns the error for what is there no more by the time that it is asked for."""
    return CommError(f"object {block.offset_bytes} is gone: its channel gave it to another reader or was dropped")
