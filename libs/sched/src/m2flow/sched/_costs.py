"""What every stage costs: the profile's models, looked up by node, chunk size, neighbours and pins."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched._cluster import Pool, links
from m2flow.sched._hand_offs import lately
from m2flow.sched._series import layout_for
from m2flow.sched._table import Floats
from m2flow.sched._workflow import Workflow
from m2flow.sched.cost import StageCost, assumed_stage, fit_corun, fit_stage, slowdown
from m2flow.sched.memory import StageMemory, fit_memory
from m2flow.sched.roofline import hardware_scale, roofline

_ASSUMED_S = 1e-3  # an item of a stage that nothing is known of
_MOVE_BYTES_PER_S = 1e10  # onload and offload, where only the bytes are known


@dataclass
class Costs:
    """Seconds and bytes of stages and groups, from a profile.

    Args:
        stages: By stage that costs device time.
        hosts: By passive stage that was profiled: its seconds come on top of the stage that it feeds.
        corun: See `fit_corun`.
        memory: By stage; missing where nothing is known.
        switches: By group.
        syncs: Seconds of publication, by sender and receiver.
        hand_offs: By stage, where they were measured.
        notes: What was assumed or estimated, in words.
        scaled, switching: What-if: factors on the seconds of stages, and of onload and offload.
    """

    workflow: Workflow
    stages: Mapping[str, StageCost]
    hosts: Mapping[str, StageCost]
    corun: Mapping[tuple[str, frozenset[str]], float]
    memory: Mapping[str, StageMemory]
    switches: Mapping[str, sched_pb2.SwitchCost]
    syncs: Mapping[tuple[str, str], float]
    latency_s: float
    bytes_per_s: float
    hand_offs: Mapping[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    scaled: Mapping[str, float] = field(default_factory=dict)
    switching: float = 1.0

    def stage_seconds(self, stage: str, items: float | Floats, devices: Floats, beside: frozenset[str]) -> Floats:
        """[N] seconds of one chunk of a stage, its transfers in and its passive feeders included."""
        seconds = self.stages[stage].seconds(items, devices) * self.scaled.get(stage, 1.0)
        if beside and self.corun:
            seconds = seconds * slowdown(self.corun, stage, beside)
        return np.asarray(seconds + self.feeding_seconds(stage, items))

    def feeding_seconds(self, stage: str, items: float | Floats) -> float | Floats:
        """Seconds that it takes to bring a chunk in: the hand-off as measured, else a message a stream; its bytes, and
        maps on the way."""
        workflow = self.workflow
        total: float | Floats = self.hand_off_s(stage)
        for edge in workflow.edges:
            if edge.stage == stage:
                if self.bytes_per_s:
                    total = total + items * edge.item_bytes / self.bytes_per_s
                for passive in edge.via:
                    if passive in self.hosts:
                        passed = np.atleast_1d(items) * workflow.volumes[passive] / max(workflow.volumes[stage], 1e-12)
                        total = total + self.hosts[passive].seconds(passed, np.ones(len(passed)))
        return total

    def hand_off_s(self, stage: str) -> float:
        """Seconds before each chunk of a stage that no byte and no item of it takes."""
        inputs = sum(edge.stage == stage for edge in self.workflow.edges)
        return self.hand_offs.get(stage, inputs * self.latency_s)

    def sync_s(self, publish: flow_pb2.Stage) -> float:
        """Seconds that a publish stage takes, with what passes before it."""
        return self.syncs.get((publish.group, publish.to), 0.0) + self.hand_offs.get(publish.name, 0.0)

    def switch_s(self, group: str) -> tuple[float, float]:
        """Seconds of onload and of offload of a group; what was not measured takes its bytes at 10 GB/s."""
        known = self.switches.get(group)
        if known is None:
            return 0.0, 0.0
        moved = max(known.resident_bytes - known.offloaded_bytes, 0.0) / _MOVE_BYTES_PER_S
        if not known.onload_s and not known.offload_s:
            return self.switching * moved, self.switching * moved
        return self.switching * known.onload_s, self.switching * known.offload_s

    def switches_s(self, groups: tuple[str, ...]) -> tuple[float, float]:
        """Seconds of onload and of offload of several groups, one after the other."""
        both = [self.switch_s(g) for g in groups]
        return sum(b[0] for b in both), sum(b[1] for b in both)

    def group_memory(
        self, group: str, stages: tuple[str, ...], items: Mapping[str, float] | Mapping[str, Floats], devices: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """[N] bytes on one device of a group: idle but resident, offloaded, and while the largest of `stages` runs."""
        known = self.switches.get(group)
        resident = np.full(len(devices), known.resident_bytes if known else 0.0)
        offloaded = np.full(len(devices), known.offloaded_bytes if known else 0.0)
        peaks = [self.memory[s].peak_bytes(items[s], devices) for s in stages if s in self.memory]
        run = np.max(peaks, axis=0) if peaks else resident
        keep = np.minimum(resident, run) if known and known.resident_bytes else run
        return keep, np.minimum(offloaded, keep), run


def build_costs(
    workflow: Workflow, profile: sched_pb2.Profile, cluster: sched_pb2.ClusterSpec, kinds: Mapping[str, Pool]
) -> Costs:
    """Fits every stage of the workflow; stages without samples are answered by a roofline, or assumed, and noted.

    What was not measured of transfers is taken from the cluster's links.
    """
    notes: list[str] = []
    taken: dict[str, list[sched_pb2.Sample]] = {}
    for sample in profile.samples:
        taken.setdefault(sample.stage, []).append(sample)
    models = {m.stage: m for m in profile.models}
    groups, stages, memory = workflow.groups, {}, {}
    for node in workflow.nodes:
        for stage in node.stages:
            group, model, samples = groups[workflow.stages[stage].group], models.get(stage), taken.get(stage, [])
            layout = layout_for(samples, group.devices_per_rank)
            alone = _alone(stage, samples, layout, notes)
            fitted = fit_stage(alone, layout=layout, lengths=samples) if alone else None
            stages[stage] = _stage(stage, fitted, model, group, kinds[group.device_kind], profile, notes)
            held = fit_memory(alone, model, layout)
            if held is not None:
                memory[stage] = held
    bytes_per_s, latency_s = links(cluster)
    hosts = {
        s: fit_stage(_alone(s, samples, (1, 1), notes), lengths=samples)
        for s, samples in taken.items()
        if s in workflow.stages and s not in stages and workflow.stages[s].kind != flow_pb2.STAGE_KIND_PUBLISH
    }
    return Costs(
        workflow=workflow,
        stages=stages,
        hosts=hosts,
        corun=fit_corun(profile.samples, stages),
        memory=memory,
        switches={s.group: s for s in profile.switches},
        syncs={(s.source, s.target): s.seconds for s in profile.syncs},
        latency_s=profile.transfer_latency_s or latency_s,
        bytes_per_s=profile.transfer_bytes_per_s or bytes_per_s,
        hand_offs=lately(profile.hand_offs),
        notes=notes,
    )


def _alone(
    stage: str, samples: list[sched_pb2.Sample], layout: tuple[int, int], notes: list[str]
) -> list[sched_pb2.Sample]:
    """The samples as if all had been taken alone, in order: those beside others without what these slow the stage by.

    None is left out: calls with little to do are beside others more often than not.
    """
    alone = [sample for sample in samples if not sample.beside]
    if len(alone) == len(samples):
        return alone
    if not alone:
        notes.append(f"{stage}: only measured beside other stages; taken as its time alone")
        return samples
    factors = fit_corun(samples, {stage: fit_stage(alone, layout=layout)})
    found = []
    for sample in samples:
        changed = sched_pb2.Sample()
        changed.CopyFrom(sample)
        changed.seconds /= factors.get((stage, frozenset(sample.beside)), 1.0)
        found.append(changed)
    return found


def _stage(
    stage: str,
    fitted: StageCost | None,
    model: sched_pb2.StageModel | None,
    group: flow_pb2.WorkerGroup,
    pool: Pool,
    profile: sched_pb2.Profile,
    notes: list[str],
) -> StageCost:
    split = max(group.devices_per_rank, 1)
    roof = None
    bounded = pool.spec.flops_per_s and pool.spec.memory_bytes_per_s
    if bounded and model is not None and model.transformer.layers and model.prompt_tokens + model.new_tokens > 0:
        roof = roofline(model, pool.spec, split=split)
    if fitted is None:
        if roof is not None:
            notes.append(f"{stage}: no samples; a roofline of {pool.kind}, right within a factor of two")
            return roof
        notes.append(
            f"{stage}: no samples and no model; assumed {_ASSUMED_S:g} s an item, right within a factor of ten"
        )
        return assumed_stage(_ASSUMED_S)
    scale, error = hardware_scale(profile.measured_on, pool.spec)
    if roof is not None and error > roof.noise:
        notes.append(
            f"{stage}: measured on {_hardware(profile)}, too unlike these devices; a roofline of "
            f"{pool.kind}, right within a factor of two"
        )
        return roof
    if (scale, error) != (1.0, 0.0):
        notes.append(
            f"{stage}: measured on {_hardware(profile)}, scaled by {scale:.3g} for this "
            f"hardware's ceilings, within {error:.0%}"
        )
    if fitted.away:
        notes.append(f"{stage}: not measured in the layout that it would have; extrapolated from others")
    return replace(fitted, scale=scale, hardware_error=error, roof=roof)


def _hardware(profile: sched_pb2.Profile) -> str:
    return profile.hardware or profile.measured_on.kind
