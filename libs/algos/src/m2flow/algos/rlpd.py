"""RLPD, online learning with prior data: batches part online, part offline; targets from a few critics of many.

With `sac`'s losses on top. Source: Ball et al. 2023 (arXiv 2302.02948), algorithm 1.
"""

import torch
from torch import Tensor

from m2flow.algos import _check
from m2flow.algos._keywords import keywords
from m2flow.algos.errors import ShapeError
from m2flow.algos.replay import UniformReplay, Windows


@keywords
def mixed_batch(
    online: UniformReplay,
    offline: UniformReplay,
    *,
    batch_size: int,
    num_steps: int,
    generator: torch.Generator,
    offline_share: float = 0.5,
) -> Windows:
    """Return B windows, the first from `online` and the last round(B * offline_share) from `offline`.

    Args:
        online, offline: replays with the same fields.
        batch_size: B, 1 or more. num_steps: L, 1 or more.
        generator: as in `UniformReplay.sample`.
        offline_share: in [0, 1]. RLPD's is a half.

    Trajectory ids are each replay's own. Raises: ShapeError where fields differ; SettingError where a replay that is
    needed is empty. Example: batch_size 5, offline_share 0.4: 3 online, 2 offline. Source: algorithm 1.
    """
    _check.at_least("mixed_batch", "batch_size", batch_size, 1)
    _check.within("mixed_batch", "offline_share", offline_share, 0.0, 1.0)
    num_offline = round(batch_size * offline_share)
    parts = [
        replay.sample(batch_size=count, num_steps=num_steps, generator=generator)
        for replay, count in ((online, batch_size - num_offline), (offline, num_offline))
        if count
    ]
    if len(parts) == 1:
        return parts[0]
    ours, theirs = parts
    layouts = [{name: (list(x.shape[2:]), x.dtype) for name, x in sorted(part.fields.items())} for part in parts]
    if layouts[0] != layouts[1]:
        raise ShapeError(
            f"mixed_batch: online has {layouts[0]} and offline {layouts[1]}, want the same fields: store the same in "
            "both"
        )
    return Windows(
        {name: torch.cat([x, theirs.fields[name]]) for name, x in ours.fields.items()},
        torch.cat([ours.mask, theirs.mask]),
        torch.cat([ours.trajectory_ids, theirs.trajectory_ids]),
        torch.cat([ours.weights, theirs.weights]),
    )


@keywords
def subset(q: Tensor, *, num_critics: int, generator: torch.Generator) -> Tensor:
    """Return [num_critics, N]: a random few of an ensemble's q-values, whose minimum the target takes.

    Args:
        q: [E, N], floating.
        num_critics: from 1 to E. RLPD takes 1 or 2 of 10.
        generator: of the CPU.

    Raises: DtypeError, ShapeError, SettingError. Example: E 3, num_critics 3: q in some order.
    Source: algorithm 1; Chen et al. 2021 (REDQ, arXiv 2101.05982).
    """
    _check.rank("subset", "q", _check.floating("subset", "q", q), "[E, N]")
    _check.within("subset", "num_critics", num_critics, 1, q.shape[0])
    chosen = torch.randperm(q.shape[0], generator=generator)[:num_critics]
    return _check.floating("subset", "q", q)[chosen.to(q.device)]
