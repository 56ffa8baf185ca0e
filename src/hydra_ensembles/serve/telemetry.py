"""What a server reports: Prometheus metrics, and one line of JSON per request. Inputs are never logged.

What lies between 0 and 1 has a histogram. Inputs like the held-out data fill the bins of p-values evenly, so drift is
visible there.
"""

import json
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from .._utils import __version__, library
from ..monitor import Monitor, OnAlarm
from ..prediction import Prediction
from .protocol import REASON_WORDS, Answer, Served

LOGGER = logging.getLogger(__name__)
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
SHARES = tuple(round(0.05 * step, 2) for step in range(1, 21))
SHOWN = ("confidence", "disagreement", "p_value", "familiarity")  # outputs between 0 and 1
SAVED_EVERY = 1.0  # seconds; a kill loses what the rows of so long have said
UNCALIBRATED = "no verdict"  # the model has no threshold
OUTCOMES = tuple(word or "accepted" for word in REASON_WORDS)


class Telemetry:
    """The metrics of one server."""

    def __init__(self, served: Served, sizes: Sequence[int], waiting: Callable[[], int]) -> None:
        """Start at zero; `sizes` are those of batches, and `waiting` returns the number of queued samples."""
        self._client = library("prometheus_client", extra="serve")
        self._registry = self._client.CollectorRegistry()
        kinds = self._client.Counter, self._client.Histogram, self._client.Gauge
        counter, histogram, gauge = (partial(kind, registry=self._registry) for kind in kinds)
        self._requests = counter("hydra_requests", "Requests by route and status.", ["route", "status"])
        self._seconds = histogram("hydra_request_seconds", "Time from first to last byte.", ["route"], buckets=SECONDS)
        self._outcomes = counter("hydra_answers", "Answers by outcome.", ["outcome"])
        self._batches = histogram("hydra_batch_rows", "Samples in a batch.", buckets=[*sizes, math.inf])
        self._batch_seconds = histogram("hydra_batch_seconds", "Time the model takes for a batch.", buckets=SECONDS)
        gauge("hydra_queue_rows", "Samples waiting for a batch.").set_function(waiting)
        model = served.ensemble
        facts = {"name": served.name, "version": __version__, "kind": model.kind}
        facts |= {"members": str(model.num_members), "classes": str(model.num_classes), "device": str(model.device)}
        gauge("hydra_model", "The model that is served.", list(facts)).labels(**facts).set(1)
        self._scores = {
            field.name: histogram(f"hydra_score_{field.name}", field.meaning, buckets=[*SHARES, math.inf])
            for field in served.outputs
            if field.name in SHOWN
        }
        meaning = "Answers by the class that was predicted, accepted or not."
        self._labels = counter("hydra_labels", meaning, ["label"])
        self._names = served.labels
        calibrated = any(field.name == "accept" for field in served.outputs)
        for word in OUTCOMES if calibrated else (UNCALIBRATED,):
            self._outcomes.labels(word)  # export zero before the first answer

    def watch(self, monitor: Monitor) -> None:
        """Report the tests of a monitor, as they are when they are asked for."""
        gauge = partial(self._client.Gauge, registry=self._registry)
        for name, meaning, value in (
            ("alarm", "Whether inputs have changed, or the promise is broken.", lambda: float(monitor.alarm)),
            ("rows", "Rows watched.", lambda: monitor.rows),
            ("audited", "Accepted rows compared with their right labels.", lambda: monitor.audited),
        ):
            gauge(f"hydra_watch_{name}", meaning).set_function(value)
        evidence = gauge("hydra_watch_log_wealth", f"Evidence of a change; {monitor.limit:.3f} is an alarm.", ["test"])
        for name in monitor.wealth:
            evidence.labels(name).set_function(lambda name=name: monitor.wealth[name])

    def stages(self, faults: Sequence[int]) -> None:
        """Report on how many batches each stage of a cascade has failed."""
        failed = self._client.Gauge("hydra_stage_faults", "Batches it failed on.", ["stage"], registry=self._registry)
        for stage in range(len(faults)):
            failed.labels(str(stage)).set_function(lambda stage=stage: faults[stage])

    def batch(self, rows: int, seconds: float) -> None:
        """Count a batch that the model has run."""
        self._batches.observe(rows)
        self._batch_seconds.observe(seconds)

    def answers(self, answers: Sequence[Answer]) -> dict[str, int]:
        """Count answers and their scores; return the number of answers per outcome."""
        counts: dict[str, int] = {}
        for answer in answers:
            outcome = OUTCOMES[int(answer["reason"])] if "reason" in answer else UNCALIBRATED
            counts[outcome] = counts.get(outcome, 0) + 1
            self._outcomes.labels(outcome).inc()
            self._labels.labels(self._names[int(answer["label"])]).inc()
            for name, histogram in self._scores.items():
                histogram.observe(float(answer[name]))
        return counts

    def request(self, route: str, status: int, seconds: float, **fields: Any) -> None:
        """Count a request, and log it."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)
        log("request", route=route, status=status, milliseconds=round(1e3 * seconds, 2), **fields)

    def exposition(self) -> tuple[bytes, str]:
        """The metrics in Prometheus format, and their content type."""
        content: bytes = self._client.generate_latest(self._registry)
        return content, str(self._client.CONTENT_TYPE_LATEST)


class Watch:
    """The monitor of a server: kept in a folder over restarts, and told to a URL when it alarms."""

    def __init__(self, model: Any, folder: Path, name: str, webhook: str = "", on_alarm: OnAlarm | None = None) -> None:
        self._path, self._name, self._webhook = folder / "monitor.json", name, webhook
        known = self._path.exists()
        self.monitor = Monitor.load(self._path, model) if known else Monitor(model)
        self.monitor.decide(model, on_alarm)
        self._lock, self._saved = threading.Lock(), -math.inf
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
        self.monitor.save(self._path)
        self._saved = time.monotonic()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """One call at a time; what it found is saved at most once a second, and an alarm at once."""
        with self._lock:
            quiet = not self.monitor.alarm
            yield
            alarmed = quiet and self.monitor.alarm
            if alarmed or time.monotonic() - self._saved > SAVED_EVERY:
                self.save()
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
