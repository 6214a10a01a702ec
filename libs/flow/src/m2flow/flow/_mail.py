"""Names and addresses inside a run: channels, the ids of what travels, and which rank a place belongs to.

An id says which producer an item comes from, which place it has, and how often it went round a loop:
"rollout.generate|3:5.2|0". A channel drops an id that it has seen, so what a restarted rank makes again arrives once.
"""

from typing import NamedTuple

from m2flow.worker import Item

# The key of an item whose consumer is whichever rank asks first.
ANYONE = ""
# What a producer tells the head of a loop when it has put in all that it has.
ENTERED = "entered"


class Address(NamedTuple):
    """The parts of an id."""

    port: str
    place: str
    round: int


def make_id(port: str, item: Item, round_: int) -> str:
    """The id under which a producer puts an item."""
    return f"{port}|{item.id}|{round_}"


def parse_id(text: str) -> Address:
    """The parts of an id that `make_id` made."""
    port, place, round_ = text.rsplit("|", 2)
    return Address(port, place, int(round_))


def inbox_channel(generation: int, stage: str) -> str:
    """The channel of a stage's inbox, anew under each plan."""
    return f"{generation}/{stage}"


def gate_channel(generation: int, stage: str) -> str:
    """The channel by which a stage learns that those it comes after have ended."""
    return f"{generation}/{stage}/after"


def key_of(item: Item, num_ranks: int, routed: bool) -> str:
    """The key of an item: its rank where items are routed, by its place at the source."""
    return str(item.seq[0] % num_ranks) if routed else ANYONE
