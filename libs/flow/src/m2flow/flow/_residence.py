"""Whether a worker is on its devices, what memory it has there, and what waits for it to be there again."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from m2flow.flow._spans import Recorder
from m2flow.proto.flow.v1 import flow_pb2 as pb
from m2flow.worker import Worker, WorkerContext, claim_memory


class Residence:
    """Loads a worker when the first of its stages enters a turn, and unloads it when the last one leaves."""

    def __init__(self, worker: Worker, context: WorkerContext, recorder: Recorder) -> None:
        self._worker = worker
        self._context = context
        self._recorder = recorder
        self._mutex = threading.Lock()
        self._inside = 0
        self._loaded = True
        # Bytes on each device: what it takes when it is there, and what is claimed for it now.
        self._size_bytes = 0
        self._claimed_bytes = 0
        # What loads new weights, by the publish stage that brought them.
        self._weights: dict[str, tuple[int, Callable[[], None]]] = {}
        self._entered: dict[str, int] = {}
        self._entry = threading.Condition()

    @contextmanager
    def within(self, stage: str, iteration: int, *, offload: bool) -> Iterator[None]:
        """Keeps the worker loaded for a stage; `offload` says whether it goes when nobody needs it."""
        with self._mutex:
            self._inside += 1
            self._load(stage, iteration)
        with self._entry:
            self._entered[stage] = iteration
            self._entry.notify_all()
        try:
            yield
        finally:
            with self._mutex:
                self._inside -= 1
                if offload and not self._inside:
                    with self._context.turn, self._recorder.span(pb.SPAN_KIND_OFFLOAD, stage, iteration):
                        self._worker.offload()
                    self._loaded = False
                    self._claim(self._worker.resident_bytes())

    def await_entry(self, stage: str, iteration: int, timeout_s: float) -> None:
        """Waits until `stage` has entered in this iteration, so that it finds the worker loaded; or gives up."""
        with self._entry:
            self._entry.wait_for(lambda: self._entered.get(stage, -1) >= iteration, timeout_s)

    def take_weights(self, stage: str, iteration: int, load: Callable[[], None]) -> None:
        """Loads new weights now where the worker is on its devices, else as soon as it is; neither needs a turn."""
        with self._mutex:
            self._weights[stage] = iteration, load
            if self._loaded:
                self._load_weights()

    def rest(self, *, offload: bool) -> None:
        """Brings a worker outside of any turn to where it belongs: off its devices where it shares them."""
        with self._mutex:
            if self._loaded is offload and not self._inside:
                with self._context.turn:
                    if offload:
                        self._size_bytes = self._worker.resident_bytes()
                        self._worker.offload()
                    else:
                        self._worker.onload()
                self._loaded = not offload
            self._claim(self._worker.resident_bytes())

    def _load(self, stage: str, iteration: int) -> None:
        if not self._loaded:
            # Refused, where it would not fit, before it is there.
            self._claim(self._size_bytes)
            with self._context.turn, self._recorder.span(pb.SPAN_KIND_ONLOAD, stage, iteration) as span:
                self._worker.onload()
                span.peak_bytes = self._size_bytes = self._worker.resident_bytes()
            self._loaded = True
            self._claim(self._size_bytes)
        self._load_weights()

    def _claim(self, size_bytes: int) -> None:
        if size_bytes != self._claimed_bytes:
            claim_memory(self._context.endpoint, self._context.device_ids, size_bytes)
            self._claimed_bytes = size_bytes

    def _load_weights(self) -> None:
        weights, self._weights = self._weights, {}
        for stage, (iteration, load) in weights.items():
            with self._context.turn, self._recorder.span(pb.SPAN_KIND_BUSY, stage, iteration) as span:
                span.items = 1
                load()
