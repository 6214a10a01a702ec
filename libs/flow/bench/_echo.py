"""A stage that does nothing."""

from m2flow.worker import Item, Worker, stage


class Echo(Worker):
    """Gives back what it takes."""

    @stage
    def work(self, items: list[Item]) -> list[Item]:
        """The items."""
        return items
