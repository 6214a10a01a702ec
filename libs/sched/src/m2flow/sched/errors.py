"""What can go wrong when planning."""


class SchedError(ValueError):
    """The base of what this package raises for a caller's mistake."""


class InputError(SchedError):
    """A workflow, profile, cluster or plan says something that cannot be used."""


class InfeasibleError(SchedError):
    """No plan fits the cluster; the message says what is missing, by how much, and which change would make it fit."""
