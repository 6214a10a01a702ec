"""Two requests side by side: what the second changes."""

from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched.planning import plan


def compare(request: sched_pb2.CompareRequest) -> sched_pb2.CompareResponse:
    """Returns both answers, and the difference in words: seconds, mode, devices of each group, memory.

    Raises:
        InputError: as `plan`.
    """
    response = sched_pb2.CompareResponse(left=plan(request.left), right=plan(request.right))
    if not response.left.plans or not response.right.plans:
        sides = ("left", response.left), ("right", response.right)
        response.text = "\n".join(f"{n}: {r.infeasible}" if not r.plans else f"{n}: fits" for n, r in sides)
        return response
    left, right = response.left.plans[0], response.right.plans[0]
    ratio = left.simulated_s / right.simulated_s
    lines = [
        f"left:  {left.simulated_s:.4g} s, {left.plan.mode}, {left.shape}",
        f"right: {right.simulated_s:.4g} s, {right.plan.mode}, {right.shape}",
        f"The right one is {ratio:.3g} times as fast."
        if ratio >= 1
        else f"The left one is {1 / ratio:.3g} times as fast.",
    ]
    before = {g.group: len(g.device_ids) for g in left.plan.groups}
    for group in right.plan.groups:
        if before.get(group.group) != len(group.device_ids):
            lines.append(f"  {group.group}: {before.get(group.group, 0)} -> {len(group.device_ids)} devices")
    if left.peak_bytes != right.peak_bytes:
        lines.append(
            f"  memory: {left.peak_bytes / 2**30:.1f} -> {right.peak_bytes / 2**30:.1f} GiB on the fullest device"
        )
    response.text = "\n".join(lines)
    return response
