"""What a server reports: Prometheus metrics, and one line of JSON per request. Inputs are never logged.

What lies between 0 and 1 has a histogram. Inputs like the held-out data fill the bins of p-values evenly, so drift is
visible there.
"""

import copy
import json
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from .._utils import __version__, library
from ..monitor import Monitor, OnAlarm
from ..prediction import OUTPUTS, Prediction
from .protocol import REASON_WORDS, Answer, Served

LOGGER = logging.getLogger(__name__)
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
SHARES = tuple(round(0.05 * step, 2) for step in range(1, 21))
FACTS = ("version", "kind", "members", "classes", "device")  # of a model
SHOWN = ("confidence", "disagreement", "p_value", "familiarity")  # outputs between 0 and 1
SAVED_EVERY = 1.0  # seconds; a kill loses what the rows of so long have said
UNCALIBRATED = "no verdict"  # the model has no threshold
OUTCOMES = tuple(word or "accepted" for word in REASON_WORDS)


class Telemetry:
    """The metrics of one server: of its requests, and those that `Counts` fills for each model."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """Start at zero; `sizes` are those of batches."""
        self._client = library("prometheus_client", extra="serve")
        self._registry = self._client.CollectorRegistry()
        kinds = self._client.Counter, self._client.Histogram, self._client.Gauge
        counter, histogram, gauge = (partial(kind, registry=self._registry) for kind in kinds)
        self._requests = counter("hydra_requests", "Requests by route and status.", ["route", "status"])
        self._seconds = histogram("hydra_request_seconds", "Time from first to last byte.", ["route"], buckets=SECONDS)
        one, shares = ["model"], [*SHARES, math.inf]
        self.outcomes = counter("hydra_answers", "Answers by outcome.", [*one, "outcome"])
        self.batches = histogram("hydra_batch_rows", "Samples in a batch.", one, buckets=[*sizes, math.inf])
        self.seconds = histogram("hydra_batch_seconds", "Time the model takes for a batch.", one, buckets=SECONDS)
        self.queue = gauge("hydra_queue_rows", "Samples waiting for a batch.", one)
        self.facts = gauge("hydra_model", "A model that is served.", [*one, *FACTS])
        self.scores = {
            name: histogram(f"hydra_score_{name}", OUTPUTS[name].meaning, one, buckets=shares) for name in SHOWN
        }
        self.labels = counter("hydra_labels", "Answers by the predicted class, accepted or not.", [*one, "label"])
        self.alarm = gauge("hydra_watch_alarm", "Whether inputs have changed, or the promise is broken.", one)
        self.watched = gauge("hydra_watch_rows", "Rows watched.", one)
        self.audited = gauge("hydra_watch_audited", "Accepted rows compared with their right labels.", one)
        meaning = "Evidence of a change, as a logarithm; hydra_watch_alarm says whether it is enough."
        self.evidence = gauge("hydra_watch_log_wealth", meaning, [*one, "test"])
        self.faults = gauge("hydra_stage_faults", "Batches a stage failed on.", [*one, "stage"])

    def request(self, route: str, status: int, seconds: float, **fields: Any) -> None:
        """Count a request, and log it."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)
        log("request", route=route, status=status, milliseconds=round(1e3 * seconds, 2), **fields)

    def exposition(self) -> tuple[bytes, str]:
        """The metrics in Prometheus format, and their content type."""
        content: bytes = self._client.generate_latest(self._registry)
        return content, str(self._client.CONTENT_TYPE_LATEST)


class Counts:
    """The metrics of one model."""

    def __init__(self, telemetry: Telemetry, served: Served, waiting: Callable[[], int]) -> None:
        """Start at zero; `waiting` returns the number of queued samples."""
        model, name, names = served.ensemble, served.name, [field.name for field in served.outputs]
        self._all, self._name, self._names = telemetry, name, served.labels
        telemetry.queue.labels(name).set_function(waiting)
        facts = (__version__, model.kind, model.num_members, model.num_classes, model.device)
        telemetry.facts.labels(name, *map(str, facts)).set(1)
        self._scores = {key: telemetry.scores[key].labels(name) for key in SHOWN if key in names}
        for word in OUTCOMES if "accept" in names else (UNCALIBRATED,):
            telemetry.outcomes.labels(name, word)  # export zero before the first answer
        for stage in range(len(model.faults)):
            telemetry.faults.labels(name, str(stage)).set_function(lambda stage=stage: model.faults[stage])

    def watch(self, monitor: Monitor) -> None:
        """Report the tests of a monitor, as they are when they are asked for."""
        self._all.alarm.labels(self._name).set_function(lambda: float(monitor.alarm))
        self._all.watched.labels(self._name).set_function(lambda: monitor.rows)
        self._all.audited.labels(self._name).set_function(lambda: monitor.audited)
        for test in monitor.wealth:
            self._all.evidence.labels(self._name, test).set_function(lambda test=test: monitor.wealth[test])

    def batch(self, rows: int, seconds: float) -> None:
        """Count a batch that the model has run."""
        self._all.batches.labels(self._name).observe(rows)
        self._all.seconds.labels(self._name).observe(seconds)

    def answers(self, answers: Sequence[Answer]) -> dict[str, int]:
        """Count answers and their scores; return the number of answers per outcome."""
        counts: dict[str, int] = {}
        for answer in answers:
            outcome = OUTCOMES[int(answer["reason"])] if "reason" in answer else UNCALIBRATED
            counts[outcome] = counts.get(outcome, 0) + 1
            self._all.outcomes.labels(self._name, outcome).inc()
            self._all.labels.labels(self._name, self._names[int(answer["label"])]).inc()
            for name, histogram in self._scores.items():
                histogram.observe(float(answer[name]))
        return counts


class Watch:
    """The monitor of a server: kept in a folder over restarts, and told to a URL when it alarms."""

    def __init__(self, model: Any, folder: Path, name: str, webhook: str = "", on_alarm: OnAlarm | None = None) -> None:
        self._path, self._name, self._webhook = folder / "monitor.json", name, webhook
        known = self._path.exists()
        self.monitor = Monitor.load(self._path, model) if known else Monitor(model)
        self.monitor.decide(model, on_alarm)
        self._lock, self._writer = threading.Lock(), ThreadPoolExecutor(1, "monitor")
        self.save()  # a folder that cannot be written is found at once
        if self.monitor.alarm:
            self._tell()

    def update(self, prediction: Prediction) -> Prediction:
        """Watch the rows of a batch."""
        with self._watching():
            return self.monitor.update(prediction)

    def audit(self, given: Any, labels: Any, accepted: Any) -> None:
        """Compare answers with right labels."""
        with self._watching():
            self.monitor.audit_labels(given, labels, accepted)

    def save(self) -> None:
        """Write the state, whose evidence a restart goes on from."""
        self._write().result()

    def _write(self) -> "Future[None]":
        """Write a copy, while the model goes on: flushing a disk may take long."""
        self._saved = time.monotonic()
        self._written = self._writer.submit(copy.deepcopy(self.monitor).save, self._path)
        return self._written

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """One call at a time; what it found is saved at most once a second, and an alarm at once."""
        with self._lock:
            quiet = not self.monitor.alarm
            yield
            alarmed = quiet and self.monitor.alarm
            if alarmed:
                self.save()
            elif self._written.done() and time.monotonic() - self._saved > SAVED_EVERY:
                if error := self._written.exception():
                    log_failure(error)
                self._write()
        if alarmed:
            self._tell()

    def _tell(self) -> None:
        about = {"model": self._name, **self.monitor.summary()}
        log("alarm", logging.WARNING, **about)
        if self._webhook:
            threading.Thread(target=_post, args=(self._webhook, {"event": "alarm", **about}), daemon=True).start()


def _post(url: str, content: dict[str, Any]) -> None:
    """Send JSON to a URL; a failure is logged after three tries."""
    body, kind = json.dumps(content).encode(), {"Content-Type": "application/json"}
    for tries in range(3):
        try:
            with urlopen(Request(url, body, kind), timeout=10):
                return
        except (OSError, ValueError) as error:
            problem = error
            time.sleep(5 * tries)
    log("webhook failed", logging.ERROR, error=type(problem).__name__)


# --- logs ------------------------------------------------------------------------------------------------------------


def log(event: str, level: int = logging.INFO, **fields: Any) -> None:
    """Write one event as a line of JSON."""
    if LOGGER.isEnabledFor(level):
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        LOGGER.log(level, json.dumps({"time": stamp, "level": logging.getLevelName(level), "event": event, **fields}))


def log_failure(error: BaseException, **fields: Any) -> None:
    """Log an internal error: its type and location, but not its message, which may quote an input."""
    frames = traceback.extract_tb(error.__traceback__)[-8:]
    where = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
    log("failure", logging.ERROR, error=type(error).__name__, where=where, **fields)


def log_to_stdout() -> None:
    """Send the log to standard output; uvicorn's warnings stay on standard error."""
    LOGGER.addHandler(logging.StreamHandler(sys.stdout))
    LOGGER.propagate = False
    LOGGER.setLevel(logging.INFO)
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # the sender of a broken form gets the error
