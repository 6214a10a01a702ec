"""Sums and extremes over groups of rows, with shapes that never depend on data."""

import torch
from torch import Tensor


class Groups:
    """Rows [N] that share an id, in any order; ids are any integers.

    Group g of the sorted ids is slot g of N slots (unused slots stay empty), so no shape depends on how many groups
    there are and `torch.compile` sees one graph.
    """

    def __init__(self, group_ids: Tensor) -> None:
        """Number the groups of `group_ids` [N] from 0 in rising order of id."""
        ordered, order = torch.sort(group_ids, stable=True)
        starts = torch.zeros_like(ordered, dtype=torch.int64)
        starts[1:] = (ordered[1:] != ordered[:-1]).long()
        self.order = order
        self.slots = torch.empty_like(starts).scatter_(0, order, starts.cumsum(0))
        self.sizes = self.sum(torch.ones_like(starts, dtype=torch.float64))

    def sum(self, x: Tensor) -> Tensor:
        """Return, for each row of `x` [N], the sum of its group."""
        return torch.zeros_like(x).index_add_(0, self.slots, x)[self.slots]

    def mean(self, x: Tensor) -> Tensor:
        """Return, for each row of `x` [N], the mean of its group."""
        return self.sum(x) / self.sizes

    def std(self, x: Tensor) -> Tensor:
        """Return, for each row of `x` [N], its group's sample standard deviation (divided by n - 1; 0 for one row)."""
        squares = self.sum((x - self.mean(x)).square())
        return (squares / (self.sizes - 1).clamp_min(1)).sqrt()

    def low(self, x: Tensor) -> Tensor:
        """Return, for each row of `x` [N], the least value of its group."""
        return torch.zeros_like(x).scatter_reduce_(0, self.slots, x, "amin", include_self=False)[self.slots]

    def high(self, x: Tensor) -> Tensor:
        """Return, for each row of `x` [N], the greatest value of its group."""
        return torch.zeros_like(x).scatter_reduce_(0, self.slots, x, "amax", include_self=False)[self.slots]

    def constant(self, x: Tensor) -> Tensor:
        """Return, for each row of `x` [N], whether all of its group are equal (bool; a group of one is)."""
        return self.low(x) == self.high(x)
