"""The tool worker: calls in, results out, in processes that can be ended when a tool hangs."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import ClassVar, Literal

from m2flow.agentic.conversation import counted
from m2flow.agentic.dialogue import error_words
from m2flow.worker import Inbox, Item, Worker, stage
from m2flow.worker.pool import Outcome, TaskPool

__all__ = ["ToolConfig", "ToolWorker"]

# While tools work, it looks this often whether further calls have come.
_LOOK_S = 0.01
_MOST_AT_ONCE = 1024


@dataclass(frozen=True)
class ToolConfig:
    """Attributes:
    targets: for each tool's name the function, as "module:qualname": text in, text out.
    num_processes: of each tool.
    timeout_s: seconds that a call has.
    max_result_characters: a longer result is an error.
    """

    targets: Mapping[str, str]
    num_processes: int
    timeout_s: float
    max_result_characters: int


class ToolWorker(Worker):
    """Its config is a `ToolConfig` as a dict. Whatever a tool does, the model reads one short line; it is counted."""

    on_death: ClassVar[Literal["retry", "drop", "stop"]] = "retry"

    def setup(self) -> None:
        """Starts the tools' processes."""
        self._config = config = ToolConfig(**self.config)
        self._pools = {
            name: TaskPool(target, num_processes=config.num_processes, timeout_s=config.timeout_s)
            for name, target in config.targets.items()
        }

    @stage
    def call(self, inbox: Inbox) -> Iterator[Item]:
        """Each conversation with its tool's `result`, as soon as it is there; others come in while tools work.

        Reads `tool` and `argument`.
        """
        yield from self._call(inbox.take)

    def results(self, items: list[Item]) -> list[Item]:
        """What `call` gives, for conversations outside the flow."""
        parts = [items]
        return list(self._call(lambda most: parts.pop() if parts else []))

    def close(self) -> None:
        """Ends the tools' processes."""
        for pool in self._pools.values():
            pool.close()

    def _call(self, take: Callable[[int], list[Item]]) -> Iterator[Item]:
        under_way: dict[Future[Outcome], Item] = {}
        while True:
            for item in take(_MOST_AT_ONCE):
                pool = self._pools.get(item.fields["tool"])
                if pool is None:
                    tools = ", ".join(self._pools)
                    yield _failed(item, "tool/unknown", f"no tool {item.fields['tool']!r}, there is {tools}")
                else:
                    under_way[pool.submit(item.fields["argument"])] = item
            if not under_way:
                return
            for future in wait(under_way, timeout=_LOOK_S, return_when=FIRST_COMPLETED).done:
                yield self._answered(under_way.pop(future), future.result())

    def _answered(self, item: Item, outcome: Outcome) -> Item:
        if outcome.kind != "done":
            return _failed(item, f"tool/{outcome.kind}", outcome.error)
        text = str(outcome.value)
        limit = self._config.max_result_characters
        if len(text) > limit:
            return _failed(item, "tool/too_long", f"a result of {len(text)} characters, at most {limit} are read")
        return item.with_fields(result=text)


def _failed(item: Item, count: str, reason: str) -> Item:
    return counted(item, count).with_fields(result=error_words(reason))
