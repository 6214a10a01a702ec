"""What can go wrong with a flow.

FlowError
├── TraceError            a program that cannot be traced: the line, and what to write there (also a ValueError)
├── GraphError            a graph that is not one: an unknown stage, a cycle without feedback (also a ValueError)
├── PlanError             a plan that cannot run, with the reason (also a ValueError)
├── RunError              a run that cannot go on: the stage, the iteration and why
└── RunStopped            a wait on a run that was stopped
"""


class FlowError(Exception):
    """The root of this package's errors."""


class TraceError(FlowError, ValueError):
    """A program that cannot be traced: each line of the message is a reason, and starts with the program's line."""


class GraphError(FlowError, ValueError):
    """A graph that is not one."""


class PlanError(FlowError, ValueError):
    """A plan that cannot run; the message says which part of it, why, and what would do.

    Attribute: `reasons`, every reason that was found, first things first.
    """

    def __init__(self, reasons: list[str]) -> None:
        self.reasons = tuple(reasons)
        more = f" (and {len(reasons) - 1} more: {'; '.join(reasons[1:])})" if len(reasons) > 1 else ""
        super().__init__(f"{reasons[0]}{more}")


class RunError(FlowError):
    """A run that cannot go on."""


class RunStopped(FlowError):
    """A wait on a run that was stopped."""
