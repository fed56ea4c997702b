"""Capture and explain, each in a child process that can be killed.

A thread that hangs in a library cannot be stopped, and a bundle that exhausts memory must not take the server along.
A child lives for many jobs, since importing takes longer than explaining, and not for ever.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rca.errors import PrioscopeError, SourceUnreachableError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from rca.serve.capturing import Origin
    from rca.telemetry.request import CaptureRequest

_log = logging.getLogger(__name__)

#: Jobs after which a child is replaced.
LIFE: Final = 200
_QUIT_SECONDS: Final = 1.0


class JobTimeoutError(SourceUnreachableError):
    """A job took longer than it may; its process was killed."""


class JobCrashedError(PrioscopeError):
    """A job failed in a way that is a defect, or its process died."""


@dataclass(frozen=True)
class Captured:
    """A bundle, as a zip file, and what it says of itself. ``missing``: what sources failed to give."""

    bundle: bytes
    title: str
    victim: str
    metric: str
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Explained:
    """An explanation as JSON, and what lists and metrics show of it."""

    json: bytes
    conclusive: bool
    victim: str
    metric: str
    cause: str
    mechanism: str
    confidence: float | None
    not_checked: tuple[str, ...]


def capture(origin: Origin, request: CaptureRequest) -> Captured:
    """Capture an incident; raises as `rca.telemetry.request.Capture`."""
    from rca.incident import SourceStatus
    from rca.serve.capturing import capture_of

    incident = capture_of(origin)(request)
    header = incident.header
    missing = tuple(
        f"{source.name}: {source.detail or source.status.value}"
        for source in header.sources
        if source.status in (SourceStatus.FAILED, SourceStatus.PARTIAL)
    )
    with tempfile.TemporaryDirectory(prefix="prioscope-") as folder:
        bundle = incident.write(Path(folder) / "incident.zip").read_bytes()
    return Captured(bundle, header.title, header.victim.node, header.victim.metric, missing)


def explain(bundle: bytes) -> Explained:
    """Explain a bundle; raises as `rca.explain.explain`."""
    from rca.explain import explain as run
    from rca.explanation import Verdict, to_json
    from rca.incident import read

    with tempfile.TemporaryDirectory(prefix="prioscope-") as folder:
        path = Path(folder) / "incident.zip"
        path.write_bytes(bundle)
        found = run(read(path))
    first = found.causes[0] if found.causes else None
    return Explained(
        json=to_json(found),
        conclusive=found.verdict is Verdict.EXPLAINED,
        victim=found.impact.victim.node,
        metric=found.impact.victim.metric,
        cause=first.node if first else "",
        mechanism=first.mechanism if first else "",
        confidence=first.confidence if first else None,
        not_checked=tuple(f"{item.what}: {item.why}" for item in found.not_checked),
    )


class Child:
    """A process that runs one job at a time. Not thread-safe: each worker has one of its own."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None
        self._jobs = 0

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float) -> Any:
        """Run ``function``, of a module, in the process and return what it returns.

        Raises:
            PrioscopeError: what the function raised.
            JobTimeoutError: it took longer than ``timeout`` seconds.
            JobCrashedError: it raised anything else, or the process died.
        """
        name = function.__name__
        pipe = self._ready()
        try:
            pipe.send((function, arguments))
            if not pipe.poll(timeout):
                self.kill()
                raise JobTimeoutError(f"{name} took longer than {timeout:g} s", cure="raise the time-out")
            fine, value = pipe.recv()
        except (EOFError, OSError):
            code = self._exit_code()
            self.kill()
            raise JobCrashedError(f"the process of {name} died (exit code {code})", cure="see the log") from None
        self._jobs += 1
        if self._jobs >= LIFE:
            self.close()
        if fine:
            return value
        if isinstance(value, PrioscopeError):
            raise value
        raise JobCrashedError(f"{name} failed: {value}", cure="report this, with the bundle")

    def _ready(self) -> Connection:
        if self._pipe is None or self._process is None or not self._process.is_alive():
            self.kill()
            ours, theirs = self._context.Pipe()
            self._process = self._context.Process(target=_serve, args=(theirs,), name="prioscope-job", daemon=True)
            self._process.start()
            theirs.close()
            self._pipe, self._jobs = ours, 0
        return self._pipe

    def _exit_code(self) -> int | None:
        if self._process is None:
            return None
        self._process.join(_QUIT_SECONDS)
        return self._process.exitcode

    def close(self) -> None:
        """Let the process go once it is idle."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if self._process is not None:
            self._process.join(_QUIT_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End the process at once; what it does is lost. May be called from another thread to stop a job."""
        process, self._process = self._process, None
        pipe, self._pipe = self._pipe, None
        if process is not None:
            process.kill()
            process.join()
            process.close()
        if pipe is not None:
            pipe.close()


def _serve(pipe: Connection) -> None:
    """Run jobs until the other end closes, as it does also when the server is killed."""
    # Ctrl-C goes to the whole group; the server says when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            function, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        answer: tuple[bool, Any]
        try:
            answer = True, function(*arguments)
        except PrioscopeError as error:
            answer = False, error
        except Exception as error:
            logging.getLogger(__name__).exception("%s failed", function.__name__)
            answer = False, f"{type(error).__name__}: {error}"
        try:
            pipe.send(answer)
        except OSError:
            return
