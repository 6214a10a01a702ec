"""A virtual world for the real stage loops, device lock and channel index: threads of which one runs at a time.

Only what carries their messages is replaced, by direct calls, and time passes only when nobody can run. Where no time
is left to pass either, that is a deadlock.
"""

import heapq
import itertools
import threading
from concurrent.futures import Future
from types import SimpleNamespace

from m2flow.comm import ChannelClosedError, IterationEnded, Request, TimeoutError_
from m2flow.comm._entries import Entry
from m2flow.comm._views import Filter
from m2flow.comm._waiting import Caller


class Deadlock(Exception):
    """Nobody can run, and no time is left to pass."""


class World:
    """Threads of which one runs at a time, chosen by chance, and a clock that moves when none can."""

    def __init__(self, chance):
        self.mutex = threading.RLock()
        self.now_s = 0.0
        self.dead = False
        self.failures = []
        self._chance = chance
        self._timers = []
        self._blocked = set()
        self._ready = []
        self._threads = []
        self._numbers = itertools.count()

    def spawn(self, jobs):
        """Runs jobs to their end; raises the first failure."""
        for job in jobs:
            self.add(job)
        with self.mutex:
            self._go_on()
        for thread in self._threads:  # which grows while it is walked
            thread.join(20)
            assert not thread.is_alive(), "the harness itself hangs"
        if self.failures:
            raise self.failures[0]

    def add(self, job):
        """Adds a thread, ready to run."""
        start = threading.Event()
        self._ready.append(start)
        self._threads.append(threading.Thread(target=self._run, args=(job, start), daemon=True))
        self._threads[-1].start()

    def _run(self, job, start):
        start.wait()
        try:
            job()
        except BaseException as failure:
            self.failures.append(failure)
        with self.mutex:
            self._go_on()

    def wait(self, promise, timeout_s=None):
        """Waits for a promise, or for the time-out; says whether it is kept."""
        with self.mutex:
            if promise.kept:
                return True
            if self.dead:
                raise Deadlock(f"at {self.now_s:.3f} s")
            event = threading.Event()
            promise.events.append(event)
            self._blocked.add(event)
            if timeout_s is not None:
                heapq.heappush(self._timers, (self.now_s + timeout_s, next(self._numbers), event))
            self._go_on()
        event.wait()
        if self.dead and not promise.kept:
            raise Deadlock(f"at {self.now_s:.3f} s")
        return promise.kept

    def wake(self, event):
        """Lets a waiting thread run when its turn comes."""
        if event in self._blocked:
            self._blocked.remove(event)
            self._ready.append(event)

    def _go_on(self):
        """Called by the thread that runs when it stops running: chooses the next."""
        while not self._ready and self._timers:
            at, _, event = heapq.heappop(self._timers)
            if event in self._blocked:
                self.now_s = at
                self.wake(event)
        if not self._ready and self._blocked:
            self.dead = True
            for event in list(self._blocked):
                self.wake(event)
        if self._ready:
            self._ready.pop(self._chance.randrange(len(self._ready))).set()

    def sleep(self, seconds):
        """Lets time pass for this thread."""
        if seconds > 0:
            self.wait(Promise(self), seconds)


class Promise:
    """A future of the virtual world."""

    def __init__(self, world):
        self.world, self.kept, self.value, self.error, self.events = world, False, None, None, []
        self.callbacks = []

    def keep(self, value=None, error=None):
        with self.world.mutex:
            self.kept, self.value, self.error = True, value, error
            for event in self.events:
                self.world.wake(event)
        for callback in self.callbacks:
            callback(self)

    def add_done_callback(self, callback):
        if self.kept:
            callback(self)
        else:
            self.callbacks.append(callback)

    def exception(self):
        return self.error

    def done(self):
        return self.kept

    set_result = keep

    def set_exception(self, error):
        self.keep(error=error)

    def result(self, timeout_s=None):
        if not self.world.wait(self, timeout_s):
            raise TimeoutError
        if self.error is not None:
            raise self.error
        return self.value


class Mutex:
    """A re-entrant lock whose waiters the world knows."""

    def __init__(self, world):
        self.world, self.owner, self.depth, self.line = world, None, 0, []

    def acquire(self, blocking=True):
        me = threading.get_ident()
        while True:
            with self.world.mutex:
                if self.owner in (None, me):
                    self.owner, self.depth = me, self.depth + 1
                    return True
                if not blocking:
                    return False
                promise = Promise(self.world)
                self.line.append(promise)
            self.world.wait(promise)

    def release(self):
        with self.world.mutex:
            self.depth -= 1
            if not self.depth:
                self.owner = None
                if self.line:
                    self.line.pop(0).keep()

    def __enter__(self):
        self.acquire()

    def __exit__(self, *_):
        self.release()


class Condition:
    """A condition whose waiters the world knows."""

    def __init__(self, world):
        self.world, self._mutex, self._changed = world, Mutex(world), Promise(world)

    def __enter__(self):
        self._mutex.acquire()

    def __exit__(self, *_):
        self._mutex.release()

    def wait_for(self, holds, timeout_s=None):
        while not (found := holds()):
            changed = self._changed
            self._mutex.release()
            kept = self.world.wait(changed, timeout_s)
            self._mutex.acquire()
            if not kept:
                return holds()
        return found

    def notify_all(self):
        changed, self._changed = self._changed, Promise(self.world)
        changed.keep()


class Line:
    """A channel's client that calls the real index directly."""

    def __init__(self, endpoint, name):
        self.name, self._endpoint, self._world = name, endpoint, endpoint.world
        self._index = endpoint.fabric.indexes[name]

    def put_many(self, puts, *, timeout_s=None):
        entries = [
            Entry(p.id, p.key, p.weight, p.iteration, self._endpoint.name, "", SimpleNamespace(item=p.item, drop=int))
            for p in puts
        ]
        self._ask(lambda caller: self._index.put(caller, entries, wait=True), timeout_s)

    def get_batch(self, weight, *, at_least=None, key=None, iteration=None, ack=(), timeout_s=None):
        self.ack(list(ack))
        found = self._ask(lambda caller: self._index.get(caller, Filter(key, iteration), weight, at_least), timeout_s)
        return [SimpleNamespace(id=e.id, number=e.lease, item=e.payload.item) for e in found]

    def get(self, *, iteration):
        return self.get_batch(0.0, iteration=iteration)[0]

    def ack(self, leases):
        many = leases if isinstance(leases, list) else [leases]
        with self._world.mutex:
            self._index.ack(self._endpoint.name, [lease.number for lease in many], give_back=False)

    def end(self, iteration):
        self._ask(lambda caller: self._index.end(caller, iteration))

    def _ask(self, act, timeout_s=None):
        promise = Promise(self._world)
        number = next(self._endpoint.numbers)
        caller = Caller(self._endpoint.name, self._endpoint.name, number, lambda *answer: promise.keep(answer))
        with self._world.mutex:
            act(caller)
        if not self._world.wait(promise, timeout_s):
            with self._world.mutex:
                self._index.cancel(self._endpoint.name, number)
        entries, refusal = promise.result()
        if refusal is None:
            return entries
        if refusal.type == "IterationEnded":
            raise IterationEnded(self.name, 0)
        if refusal.type == "TimeoutError_":
            raise TimeoutError_(channel=self.name, key=None, peer="", elapsed_s=timeout_s)
        raise ChannelClosedError(self.name, str(refusal))


class Fabric:
    """The endpoints of one case, who call each other directly."""

    def __init__(self, world):
        self.world, self.indexes, self.handlers, self.weights = world, {}, {}, {}

    def endpoint(self, name):
        return VirtualEndpoint(self, name)


class VirtualEndpoint:
    """As much of an endpoint as stage loops and the lock use."""

    def __init__(self, fabric, name):
        self.fabric, self.world, self.name, self.numbers = fabric, fabric.world, name, itertools.count(1)

    def channel(self, name, *, host):
        return Line(self, name)

    def handle(self, service, handler, *, prompt=False):
        self.fabric.handlers[self.name, service] = handler

    def on_peer_lost(self, callback):
        pass

    def stage_weights(self, name, version, weights):
        self._staged(self.name, name, version).keep(weights)

    def fetch_weights(self, peer, name, version):
        return self._staged(peer, name, version).result()

    def _staged(self, *key):
        with self.world.mutex:
            return self.fabric.weights.setdefault(key, Promise(self.world))

    def request_async(self, peer, service, method, args=None):
        promise = Promise(self.world)
        answer = self.fabric.handlers[peer, service](Request(self.name, service, method, args))
        if isinstance(answer, Future):
            answer.add_done_callback(lambda done: promise.keep(done.result()))
        else:
            promise.keep(answer)
        return promise

    def request(self, peer, service, method, args=None, *, timeout_s=None):
        return self.request_async(peer, service, method, args).result(timeout_s)


class Pool:
    """An executor of the virtual world: a thread for each job."""

    def __init__(self, world):
        self._world = world

    def submit(self, function):
        promise = Promise(self._world)

        def job():
            try:
                promise.keep(function())
            except BaseException as failure:
                promise.keep(error=failure)

        with self._world.mutex:
            self._world.add(job)
        return promise
