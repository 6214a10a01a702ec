"""One run's workers, as the driver sees them: it starts groups, calls them, and learns of the first failure.

The session speaks `worker/v1` over *links*, one to each node's agent. What it hears arrives on the links' threads; what
it says never blocks. A failure ends the run unless the group's `on_death` says otherwise: the first cause is kept,
every call under way ends with it, and the other workers are stopped.
"""

import itertools
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from m2flow.comm import Endpoint, encode
from m2flow.proto.worker.v1 import worker_pb2 as pb
from m2flow.worker._addresses import AddressBook
from m2flow.worker._cause import failure_of
from m2flow.worker._known import KnownRank
from m2flow.worker._meeting import MeetingServer
from m2flow.worker._verdict import Verdict
from m2flow.worker._wire import device_to_proto, failure_from_proto, failure_report, group_key, group_of
from m2flow.worker.call import CallHandle
from m2flow.worker.cluster import Cluster
from m2flow.worker.device import Device
from m2flow.worker.errors import CallTimeout, LaunchError, PlacementError, SessionClosedError, WorkerFailed
from m2flow.worker.group import WorkerGroup
from m2flow.worker.placement import Placement, parse_placement
from m2flow.worker.residency import ResidencyServer
from m2flow.worker.spec import GroupSpec
from m2flow.worker.watchdog import Watchdog
from m2flow.worker.wiring import Link, Wiring

RankKey = tuple[str, int]
GIVER, TAKER = "m2flow.worker._estate:Giver", "m2flow.worker._estate:Taker"

LogSink = Callable[[str, int, str], None]


class Session:
    """A run in progress; made by `launch_run`, ended by `close`, or by the `with` that holds it."""

    def __init__(
        self,
        cluster: Cluster,
        endpoint: Endpoint,
        run_dir: Path,
        *,
        directory: Path,
        token: str,
        preload: Sequence[str],
        connect: Callable[[Wiring], Mapping[str, Link]],
        on_log: LogSink,
        max_restarts: int,
        silence_s: float,
        start_timeout_s: float,
        say: Callable[[str], None],
    ) -> None:
        self.cluster = cluster
        self.endpoint = endpoint
        self.run_dir = run_dir
        self.groups: dict[str, WorkerGroup] = {}
        self._by_key: dict[str, WorkerGroup] = {}
        self._on_log = on_log
        self.directory = directory
        self._token = token
        self._max_restarts = max_restarts
        self._start_timeout_s = start_timeout_s
        self._mutex = threading.RLock()
        self._ids = itertools.count(1)
        self._ranks: dict[RankKey, KnownRank] = {}
        self._handles: dict[int, tuple[str, CallHandle]] = {}
        self._starting: dict[RankKey, CallHandle] = {}
        self._closed = False
        self._failure: WorkerFailed | None = None
        self._verdict = Verdict(self._condemn)
        self.watchdog = Watchdog(silence_s, say)
        self.watchdog.add_witness(self._waits)
        self.residency = ResidencyServer(endpoint, cluster.devices)
        MeetingServer(endpoint)
        wiring = Wiring(directory, token, preload, self._on_response, self._on_lost)
        self._links = dict(connect(wiring))
        try:
            self._addresses = AddressBook(endpoint, [link.host for link in self._links.values()])
        except BaseException:
            self._close_links()
            raise
        self.watchdog.start()

    @property
    def failure(self) -> WorkerFailed | None:
        """The first cause of the run's end; None while there is none."""
        return self._failure

    def start(self, spec: GroupSpec, placement: Placement | str, *, timeout_s: float | None = None) -> WorkerGroup:
        """Starts one group and waits until every rank's `setup` has returned; see `start_all`."""
        return self.start_all([(spec, placement)], timeout_s=timeout_s)[0]

    def start_all(
        self, wanted: Sequence[tuple[GroupSpec, Placement | str]], *, timeout_s: float | None = None
    ) -> list[WorkerGroup]:
        """Starts groups side by side and waits until every rank's `setup` has returned. Blocks.

        Raises PlacementError on a placement that does not fit, LaunchError on a name that is taken or a start that
        takes longer than `timeout_s` (None: the run's `start_timeout_s`), WorkerFailed where a rank fails.
        """
        self._check_open()
        placed = [(spec, self._placed(spec, placement)) for spec, placement in wanted]
        handles = [self._begin(spec, placement, spec.name) for spec, placement in placed]
        self._await_start(handles, timeout_s)
        return [self.groups[spec.name] for spec, _ in placed]

    def replace(self, group: WorkerGroup, placement: Placement | str, *, timeout_s: float | None = None) -> WorkerGroup:
        """Gives one group other devices or another number of ranks; see `replace_all`."""
        return self.replace_all([(group, placement)], timeout_s=timeout_s)[0]

    def replace_all(
        self, moves: Sequence[tuple[WorkerGroup, Placement | str]], *, timeout_s: float | None = None
    ) -> list[WorkerGroup]:
        """Gives groups other devices or other numbers of ranks, side by side; returns those that follow them. Blocks.

        No process is moved. The present ranks offload and hand over their names, new ranks start, what `Worker.shards`
        named streams to them, cut as they want it, and the former ranks are stopped: before the new ones start, where
        they keep nothing. To be called when nothing is asked of the groups. Raises PlacementError where nothing has
        happened yet; LaunchError or WorkerFailed, as `start_all` does, where the groups are lost.
        """
        placed = [self._placed(group.spec, placement) for group, placement in moves]
        retiring = [group for group, _ in moves]
        estates = [group.attach("estate", GIVER, next(self._ids)) for group in retiring]
        offers = [handle.result() for handle in [estate.give() for estate in estates]]
        for group, offered in zip(retiring, offers, strict=True):
            self._retire(group, offered)
        sources = [[name for name, _ in offered] for offered in offers]
        starts = [
            self._begin(group.spec, placement, group_key(group.name, next(self._ids)))
            for group, placement in zip(retiring, placed, strict=True)
        ]
        self._await_start(starts, timeout_s)
        heirs = [self.groups[group.name] for group in retiring]
        keeping = [number for number, names in enumerate(sources) if any(names)]
        for handle in [heirs[n].attach("inheritance", TAKER, sources[n]).take() for n in keeping]:
            handle.wait()
        for handle in [estates[n].leave() for n in keeping]:
            handle.wait()
        for number in keeping:
            for name in sources[number]:
                self._addresses.forget(name)
            self.stop(retiring[number])
        return heirs

    def stop(self, group: WorkerGroup, *, grace_s: float = 10.0) -> None:
        """Stops a group: each rank after the calls that it has, or by a signal after the grace. Blocks.

        Calls that it has not answered by then end with SessionClosedError.
        """
        keys = [(group.key, rank) for rank in group.ranks]
        self._leave(keys, grace_s)
        with self._mutex:
            for key in keys:
                self._ranks.pop(key, None)
            del self._by_key[group.key]
            if self.groups.get(group.name) is group:
                del self.groups[group.name]
                for rank in group.ranks:
                    self.residency.release(f"{group.name}.{rank}")
            left = [call_id for call_id, (key, _) in self._handles.items() if key == group.key]
            handles = [self._handles.pop(call_id)[1] for call_id in left]
        for handle in handles:
            handle.fail(SessionClosedError(f"{handle.name}: group {group.name} was stopped before it answered"))

    def close(self, *, grace_s: float = 2.0) -> None:
        """Ends all workers, the agents and the run's private directory. Blocks; the second time it does nothing."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
        self.watchdog.end()
        self._leave(list(self._ranks), grace_s)
        self._close_links()
        self._fail_handles(self._failure or SessionClosedError("session: closed while calls were under way"))
        self.endpoint.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _close_links(self) -> None:
        for link in dict.fromkeys(self._links.values()):  # Several nodes may share one.
            link.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(grace_s=0.2 if failure is not None else 2.0)

    def call(self, group: str, attached: str, method: str, arguments: dict[int, tuple[Any, ...]]) -> CallHandle:
        """Calls a method on some ranks, each with its own arguments; the way of `WorkerGroup`. Does not block."""
        name = ".".join(word for word in (group_of(group), attached, method) if word)
        encoded = [(ranks, encode(args).to_bytes()) for ranks, args in _alike(arguments)]
        call_id, handle = self._new_handle(group, name, tuple(arguments))
        for ranks, args in encoded:
            call = pb.Call(group=group, ranks=ranks, attached=attached, method=method, arguments=args)
            self._send(pb.SessionRequest(id=call_id, call=call), group, ranks)
        return handle

    def attach(self, group: str, name: str, target: str, arguments: tuple[Any, ...]) -> CallHandle:
        """Makes an object beside every rank of a group; the way of `WorkerGroup`. Does not block."""
        with self._mutex:
            ranks = self._group(group).ranks
        attach = pb.Attach(group=group, ranks=ranks, name=name, target=target, arguments=encode(arguments).to_bytes())
        call_id, handle = self._new_handle(group, f"{group_of(group)}.{name}.start", ranks)
        request = pb.SessionRequest(id=call_id, attach=attach)
        with self._mutex:
            for rank in ranks:
                self._ranks[group, rank].attached.append(request)
            self._send(request, group, ranks)
        return handle

    def kill(self, group: str, rank: int) -> None:
        """Sends SIGKILL to a rank's process; RefusedError where ranks are threads."""
        request = pb.SessionRequest(kill=pb.KillWorker(group=group, rank=rank))
        self._ranks[group, rank].link.send(request)

    def pid(self, group: str, rank: int) -> int:
        """The process that holds a rank now."""
        return self._ranks[group, rank].pid

    def _placed(self, spec: GroupSpec, placement: Placement | str) -> Placement:
        if isinstance(placement, str):
            width = spec.devices_per_rank
            placement = parse_placement(placement, self.cluster, kind=spec.device_kind, devices_per_rank=width)
        placement.check(self.cluster)
        wrong = [number for number in placement.device_ids if self.cluster.devices[number].kind != spec.device_kind]
        if wrong:
            raise PlacementError(
                f"group {spec.name}: got device {wrong[0]}, a {self.cluster.devices[wrong[0]].kind!r}, "
                f"want devices of kind {spec.device_kind!r}"
            )
        nodes = [self.cluster.devices[ids[0]].node for ids in placement.ranks]
        for first in range(0, len(nodes), spec.ranks_per_process):
            if len(set(nodes[first : first + spec.ranks_per_process])) > 1:
                raise PlacementError(
                    f"group {spec.name}: got ranks {first} to {first + spec.ranks_per_process - 1} on "
                    f"{', '.join(dict.fromkeys(nodes[first : first + spec.ranks_per_process]))}, want one node: "
                    f"they share a process (ranks_per_process={spec.ranks_per_process})"
                )
        return placement

    def _retire(self, group: WorkerGroup, offers: Sequence[tuple[str, str]]) -> None:
        """Makes room for the group that follows; `offers` are what its ranks' `Giver.give` returned, in rank order."""
        with self._mutex:
            del self.groups[group.name]
            for rank, (name, address) in zip(group.ranks, offers, strict=True):
                self.residency.release(f"{group.name}.{rank}")
                if address:
                    self._addresses.enter(name, self._ranks[group.key, rank].link.host, address)
        if not any(name for name, _ in offers):
            self.stop(group)

    def _await_start(self, handles: Sequence[CallHandle], timeout_s: float | None) -> None:
        end = time.monotonic() + (self._start_timeout_s if timeout_s is None else timeout_s)
        for handle in handles:
            try:
                handle.wait(max(0.0, end - time.monotonic()))
            except CallTimeout as late:
                raise LaunchError(
                    f"{late}: raise launch_run's start_timeout_s, or timeout_s here, if its setup is that slow"
                ) from late

    def _begin(self, spec: GroupSpec, placement: Placement, key: str) -> CallHandle:
        config = encode(spec.config).to_bytes()
        with self._mutex:
            if spec.name in self.groups:
                raise LaunchError(f"group {spec.name}: there is one of that name already: give the second one a name")
            self._check_open()
            group = self.groups[spec.name] = self._by_key[key] = WorkerGroup(self, spec, placement, key)
            handle = CallHandle(f"{spec.name}.setup", group.ranks, lambda: None)
            for rank, ids in enumerate(placement.ranks):
                devices = [self.cluster.devices[number] for number in ids]
                link = self._links[devices[0].node]
                order = pb.StartWorker(
                    group=key,
                    rank=rank,
                    world_size=placement.world_size,
                    target=spec.target,
                    config=config,
                    devices=map(device_to_proto, devices),
                    run_dir=str(self.run_dir),
                    environment=_environment(devices),
                    process=rank // spec.ranks_per_process + 1 if spec.ranks_per_process > 1 else 0,
                    token=self._token if link.host else "",
                    peers=self._addresses.elsewhere(link.host),
                    host=self._addresses.host_of(link.host),
                )
                self._ranks[key, rank] = KnownRank(link, order, spec.on_death, time.monotonic())
                self._starting[key, rank] = handle
        for rank in group.ranks:
            known = self._ranks[key, rank]
            known.link.send(pb.SessionRequest(start=known.order))
        return handle

    def _new_handle(self, group: str, name: str, ranks: tuple[int, ...]) -> tuple[int, CallHandle]:
        call_id = next(self._ids)
        handle = CallHandle(name, ranks, lambda: self._cancel(call_id, group, ranks))
        with self._mutex:
            self._check_open()
            self._group(group)
            self._handles[call_id] = (group, handle)
        return call_id, handle

    def _group(self, key: str) -> WorkerGroup:
        if key not in self._by_key:
            raise SessionClosedError(f"group {group_of(key)}: it was stopped: start it again")
        return self._by_key[key]

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise SessionClosedError("session: it is closed: start another with launch_run")

    def _send(self, request: pb.SessionRequest, group: str, ranks: Sequence[int]) -> None:
        by_link: dict[Link, list[int]] = {}
        now_s = time.monotonic()
        with self._mutex:
            self._group(group)  # It may have been stopped since it was called.
            for rank in ranks:
                known = self._ranks[group, rank]
                known.ask(request, now_s)
                if not known.restarting:
                    by_link.setdefault(known.link, []).append(rank)
            # Under the lock: a rank that came again in between would get this in its setup, and once more after it.
            for link, its_ranks in by_link.items():
                link.send(request if len(its_ranks) == len(ranks) else _for_ranks(request, its_ranks))

    def _cancel(self, call_id: int, group: str, ranks: tuple[int, ...]) -> None:
        links: dict[Link, None] = {}
        with self._mutex:
            self._handles.pop(call_id, None)
            for rank in ranks:
                known = self._ranks.get((group, rank))
                if known is not None and known.answered(call_id):
                    links[known.link] = None
        for link in links:
            link.send(pb.SessionRequest(cancel=pb.CancelCall(call_id=call_id, group=group, ranks=ranks)))

    def _on_response(self, response: pb.SessionResponse) -> None:
        try:
            self._hear(response)
        except Exception as failure:
            # A link's thread must live on: a driver that has gone deaf would wait for ever.
            self._verdict.hear(failure_of(failure, "driver", 0, "listening").failure)

    def _hear(self, response: pb.SessionResponse) -> None:
        kind = response.WhichOneof("kind")
        self.watchdog.stir()
        if kind == "results":
            self._on_results(response.results.results)
        elif kind == "started":
            self._on_started((response.started.group, response.started.rank), response.started)
        elif kind == "log":
            self._on_line((response.log.group, response.log.rank), response.log.text)
        elif kind == "failure":
            self._on_failure(response.failure)
        elif kind == "stopped":
            self._on_stopped((response.stopped.group, response.stopped.rank))

    def _on_results(self, results: Sequence[pb.CallResult]) -> None:
        with self._mutex:
            heard = [(handle, result) for result in results if (handle := self._noted(result)) is not None]
        for handle, result in heard:
            if handle.answer(result):
                with self._mutex:
                    self._handles.pop(result.call_id, None)

    def _noted(self, result: pb.CallResult) -> CallHandle | None:
        """Whose answer it is; None where the call was given up, or the run has failed."""
        group, handle = self._handles.get(result.call_id, ("", None))
        known = self._ranks.get((group, result.rank))
        if handle is None:  # Another of the ranks that were asked has died and dropped it.
            asked = (one for (_, rank), one in self._ranks.items() if rank == result.rank)
            known = next((one for one in asked if result.call_id in one.unanswered), None)
        if known is not None:  # Its group may have been stopped since.
            known.answered(result.call_id)
            known.num_failures = 0
        return handle

    def _on_started(self, key: RankKey, started: pb.Started) -> None:
        with self._mutex:
            known = self._ranks.get(key)
            if known is None or started.attempt != known.order.attempt:
                return
            known.pid = started.pid
            if started.address:
                self._introduce(key, known, started.address)
            handle = self._starting.pop(key, None)
            if known.restarting:
                known.restarting = False
                for request in known.to_repeat():
                    known.link.send(_for_ranks(request, [key[1]]))
        if handle is not None:
            handle.answer(pb.CallResult(rank=key[1]))

    def _introduce(self, key: RankKey, known: KnownRank, address: str) -> None:
        """Tells a rank where those on other machines are, and those where it is."""
        name, host = f"{group_of(key[0])}.{key[1]}", known.link.host
        self._addresses.enter(name, host, address)
        there = pb.Peers(group=key[0], ranks=[key[1]], addresses=self._addresses.elsewhere(host))
        known.link.send(pb.SessionRequest(peers=there))
        for other, its in self._ranks.items():
            if its.pid and other != key:
                # Where there was one of its name before it, on another machine, that address goes.
                reached = {name: address if its.link.host != host else ""}
                here = pb.Peers(group=other[0], ranks=[other[1]], addresses=reached)
                its.link.send(pb.SessionRequest(peers=here))

    def _on_stopped(self, key: RankKey) -> None:
        with self._mutex:
            known = self._ranks.get(key)
            if known is None:
                return
            known.ending = False
            if known.restarting and not known.leaving:
                known.link.send(pb.SessionRequest(start=known.order))
                return
        known.stopped.set()

    def _on_line(self, key: RankKey, line: str) -> None:
        with self._mutex:
            if key in self._ranks:
                self._ranks[key].log.append(line)
        self._on_log(group_of(key[0]), key[1], line)

    def _waits(self, now_s: float) -> list[str]:
        with self._mutex:
            return [line for known in self._ranks.values() for line in known.waits(now_s)]

    def _on_failure(self, report: pb.FailureReport) -> None:
        key = (report.group, report.rank)
        with self._mutex:
            known = self._ranks.get(key)
            if known is not None and (known.leaving or report.attempt != known.order.attempt):
                return  # Word of an end that was asked for, or is known.
            if known is not None and not report.phase:
                report.phase = known.phase()
                report.pid = 0 if known.restarting else known.pid
            if known is None or not known.may_restart(self._max_restarts):
                self._verdict.hear(report)
                return
            failure = failure_from_proto(report, known.log)
            known.num_failures += 1
            known.restarting = True
            known.order.attempt += 1
            lost = [] if known.on_death == "retry" else known.forget_calls()
            handles = [self._handles.pop(call_id, ("", None))[1] for call_id in lost]
            # Before anybody can stop the group: later it would end who bears its name then.
            self._send_stop(key, known, 0.0)
        self._on_log(group_of(key[0]), key[1], f"restarted after: {failure}")
        for handle in handles:
            if handle is not None:
                handle.fail(failure)

    def _on_lost(self, reason: str) -> None:
        with self._mutex:
            for known in self._ranks.values():
                if known.link.lost:
                    known.stopped.set()
        self._verdict.hear(failure_report("agent", 0, pid=0, phase="idle", cause=reason).failure)

    def _condemn(self, report: pb.FailureReport) -> None:
        with self._mutex:
            if self._closed or self._failure is not None:
                return
            known = self._ranks.get((report.group, report.rank))
            first = self._failure = failure_from_proto(report, known.log if known is not None else ())
        self._tell_stop(list(self._ranks), grace_s=0.2)
        self._fail_handles(first)

    def _fail_handles(self, failure: Exception) -> None:
        with self._mutex:
            handles = [handle for _, handle in self._handles.values()]
            handles += self._starting.values()
            self._handles.clear()
            self._starting.clear()
        for handle in handles:
            handle.fail(failure)

    def _leave(self, keys: Sequence[RankKey], grace_s: float) -> None:
        self._tell_stop(keys, grace_s)
        end = time.monotonic() + grace_s + 2.0
        for key in keys:
            self._ranks[key].stopped.wait(max(0.0, end - time.monotonic()))

    def _tell_stop(self, keys: Sequence[RankKey], grace_s: float) -> None:
        for key in keys:
            with self._mutex:
                known = self._ranks[key]
                if known.leaving:
                    continue
                known.leaving = True
                # One that ends already, to be started again, says so once.
                if not known.ending:
                    self._send_stop(key, known, grace_s)

    def _send_stop(self, key: RankKey, known: KnownRank, grace_s: float) -> None:
        known.ending = True
        known.link.send(pb.SessionRequest(stop=pb.StopWorker(group=key[0], rank=key[1], grace_s=grace_s)))


def _environment(devices: Sequence[Device]) -> dict[str, str]:
    """What a rank's process must see of its devices: of CUDA its own alone, which it counts from 0."""
    cuda = [device.labels["uuid"] for device in devices if device.kind == "cuda"]
    return {"CUDA_VISIBLE_DEVICES": ",".join(cuda)} if cuda else {}


def _alike(arguments: dict[int, tuple[Any, ...]]) -> Iterator[tuple[list[int], tuple[Any, ...]]]:
    """The ranks that have the very same arguments, so that those are encoded once."""
    ranks: dict[int, list[int]] = {}
    for rank, args in arguments.items():
        ranks.setdefault(id(args), []).append(rank)
    for alike in ranks.values():
        yield alike, arguments[alike[0]]


def _for_ranks(request: pb.SessionRequest, ranks: Sequence[int]) -> pb.SessionRequest:
    """The same request for these ranks alone."""
    told = pb.SessionRequest()
    told.CopyFrom(request)
    inner = told.call if told.HasField("call") else told.attach
    inner.ranks[:] = ranks
    return told
