"""``rca exporter``: serve priority violations and GPU fragmentation to Prometheus, and record snapshots."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from exporters.model import Ranking
    from exporters.policy import Policy
    from exporters.poller import Consumer, Poller
    from exporters.sources.base import Source
    from exporters.tracker import Tracker

app = typer.Typer(
    help="Serve priority violations and GPU fragmentation to Prometheus.", no_args_is_help=True, rich_markup_mode=None
)
record_app = typer.Typer(
    help="Write the snapshots of a source to a file, for `rca exporter file`, tests and post-mortems.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(record_app, name="record")

#: Apart, so that several exporters may run on one machine.
PORTS: Final = {"gpu": 9941, "slurm": 9942, "kubernetes": 9943, "file": 9944}


class LogLevel(StrEnum):
    """What goes to stderr."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


_Listen = Annotated[str, typer.Option("--listen", help="HOST:PORT, :PORT (every interface), [IPv6]:PORT or unix:PATH.")]


_Interval = Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between polls.")]
_MaxAge = Annotated[
    float | None,
    typer.Option(
        "--max-age",
        min=0.1,
        help="Withhold a snapshot that is older, in seconds. Default: four intervals, at least 60.",
        show_default=False,
    ),
]
_WebConfig = Annotated[
    Path | None,
    typer.Option(
        "--web-config", help="TLS and basic auth, in the format of Prometheus' exporter-toolkit.", show_default=False
    ),
]
_Once = Annotated[bool, typer.Option("--once", help="Poll once, print the exposition and exit.")]
_OpenMetrics = Annotated[bool, typer.Option("--openmetrics", help="With --once: print OpenMetrics.")]
_Log = Annotated[LogLevel, typer.Option("--log-level", help="What to log to stderr.")]
_Policy = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help="Policy file, or the name of a shipped profile. Default: wait SLOs of 60 s, 5 and 30 min.",
        show_default=False,
    ),
]
_State = Annotated[
    Path | None,
    typer.Option(
        "--state", help="Keep counters in this file, so that a restart does not reset them.", show_default=False
    ),
]
_Cluster = Annotated[str, typer.Option("--cluster", help="Name of the cluster in the metrics.")]

_Node = Annotated[
    str | None,
    typer.Option("--node", help="Name of this node. Default: $NODE_NAME, else the host name.", show_default=False),
]
_AllocatorSocket = Annotated[
    Path | None,
    typer.Option(
        "--allocator-socket", help="Listen here for reports of PyTorch processes (exporters.probe).", show_default=False
    ),
]
_AllocatorFolder = Annotated[
    Path | None,
    typer.Option(
        "--allocator-folder", help="Look here for allocator reports and PyTorch memory snapshots.", show_default=False
    ),
]
_Kubeconfig = Annotated[
    Path | None,
    typer.Option(
        "--kubeconfig", help="Default: the service account, else $KUBECONFIG or ~/.kube/config.", show_default=False
    ),
]
_Context = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.", show_default=False)]
_GpuOnly = Annotated[bool, typer.Option("--gpu-only", help="Leave out workloads that ask for no GPU.")]

_Rest = Annotated[
    str | None,
    typer.Option(
        "--rest",
        help="slurmrestd: http://HOST:6820 or unix:/PATH. Default: read with squeue, sinfo and scontrol.",
        show_default=False,
    ),
]
_User = Annotated[str | None, typer.Option("--user", help="With --rest: for whom the token is.", show_default=False)]
_TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        help="With --rest: a file with a token, read again for each poll. Default: $SLURM_JWT.",
        show_default=False,
    ),
]
_ApiVersion = Annotated[
    int | None,
    typer.Option(
        "--api-version",
        min=38,
        max=44,
        help="With --rest: 38 to 44, for 0.0.38 to 0.0.44. Default: the newest that the server has.",
        show_default=False,
    ),
]
_PreemptType = Annotated[
    str | None,
    typer.Option(
        "--preempt-type",
        help="With --rest: PreemptType of slurm.conf, such as preempt/qos, which slurmrestd does not tell.",
        show_default=False,
    ),
]
_Commands = Annotated[
    Path | None,
    typer.Option("--commands", help="Folder with Slurm's commands. Default: the path.", show_default=False),
]
_Conf = Annotated[
    Path | None, typer.Option("--conf", help="slurm.conf. Default: $SLURM_CONF, else Slurm's.", show_default=False)
]
_Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds for one request or command.")]
_SlurmCluster = Annotated[
    str | None,
    typer.Option("--cluster", help="Name of the cluster in the metrics. Default: Slurm's own.", show_default=False),
]

_Out = Annotated[Path, typer.Option("--out", help="File to write, JSON Lines; .gz compresses.", show_default=False)]
_Polls = Annotated[
    int | None, typer.Option("--polls", min=1, help="Stop after this many snapshots.", show_default=False)
]
_Append = Annotated[bool, typer.Option("--append", help="Go on with a file that exists.")]


@dataclass(frozen=True, slots=True)
class _SlurmAccess:
    """How to read Slurm, as given on the command line."""

    rest: str | None
    user: str | None
    token_file: Path | None
    api_version: int | None
    preempt_type: str | None
    commands: Path | None
    conf: Path | None
    timeout: float
    cluster: str | None

    def check(self) -> None:
        """Refuse options that would have no effect."""
        from rca.errors import InvalidInputError

        for_rest = {
            "--user": self.user,
            "--token-file": self.token_file,
            "--api-version": self.api_version,
            "--preempt-type": self.preempt_type,
        }
        for_commands = {"--commands": self.commands, "--conf": self.conf}
        for name, value in (for_commands if self.rest else for_rest).items():
            if value is not None:
                other, change = ("does not go with --rest", "drop") if self.rest else ("needs --rest", "give")
                raise InvalidInputError(f"{name} {other}", cure=f"leave {name} out, or {change} --rest")


@dataclass(frozen=True, slots=True)
class Serving:
    """How to serve: what every exporter takes."""

    name: str
    listen: str
    interval: float
    max_age: float | None
    web_config: Path | None
    once: bool
    openmetrics: bool
    log: LogLevel


# --- serving


@app.command("gpu")
def gpu(
    listen: _Listen = f":{PORTS['gpu']}",
    interval: _Interval = 15.0,
    max_age: _MaxAge = None,
    node: _Node = None,
    allocator_socket: _AllocatorSocket = None,
    allocator_folder: _AllocatorFolder = None,
    web_config: _WebConfig = None,
    once: _Once = False,
    openmetrics: _OpenMetrics = False,
    log: _Log = LogLevel.INFO,
) -> None:
    """Serve the NVIDIA GPUs of this machine: health, memory, MIG, processes, memory fragmentation.

    Starts without a driver too, and says so in prioscope_source_up and prioscope_source_unread.

    \b
    Examples:
      rca exporter gpu
      rca exporter gpu --once
      rca exporter gpu --listen 127.0.0.1:9941 --allocator-socket /run/prioscope/allocator.sock
    """
    from exporters.collectors.devices import DeviceCollector

    serving = Serving("gpu", listen, interval, max_age, web_config, once, openmetrics, log)
    _serve(serving, _gpu_source(node, allocator_socket, allocator_folder), DeviceCollector())


@app.command("slurm")
def slurm(
    listen: _Listen = f":{PORTS['slurm']}",
    interval: _Interval = 15.0,
    max_age: _MaxAge = None,
    cluster: _SlurmCluster = None,
    rest: _Rest = None,
    user: _User = None,
    token_file: _TokenFile = None,
    api_version: _ApiVersion = None,
    preempt_type: _PreemptType = None,
    commands: _Commands = None,
    conf: _Conf = None,
    timeout: _Timeout = 30.0,
    policy: _Policy = None,
    state: _State = None,
    web_config: _WebConfig = None,
    once: _Once = False,
    openmetrics: _OpenMetrics = False,
    log: _Log = LogLevel.INFO,
) -> None:
    """Serve a Slurm cluster: priority violations, queues, fragmentation.

    Reads with Slurm's commands on this machine, or through slurmrestd (--rest), once a poll and never for a scrape.

    \b
    Examples:
      rca exporter slurm
      rca exporter slurm --once
      rca exporter slurm --rest http://slurm-head:6820 --token-file /etc/prioscope/slurm.jwt
      rca exporter slurm --policy policy.yaml --state /var/lib/prioscope/slurm.json
    """
    rules = _load_policy(policy)
    serving = Serving("slurm", listen, interval, max_age, web_config, once, openmetrics, log)
    access = _SlurmAccess(rest, user, token_file, api_version, preempt_type, commands, conf, timeout, cluster)
    _serve_cluster(serving, _slurm_source(access, _ranking(policy, rules)), rules, state)


@app.command("kubernetes")
def kubernetes(
    listen: _Listen = f":{PORTS['kubernetes']}",
    interval: _Interval = 15.0,
    max_age: _MaxAge = None,
    cluster: _Cluster = "kubernetes",
    kubeconfig: _Kubeconfig = None,
    context: _Context = None,
    gpu_only: _GpuOnly = False,
    policy: _Policy = None,
    state: _State = None,
    web_config: _WebConfig = None,
    once: _Once = False,
    openmetrics: _OpenMetrics = False,
    log: _Log = LogLevel.INFO,
) -> None:
    """Serve a Kubernetes cluster: priority violations, queues, fragmentation; Kueue and Volcano where installed.

    \b
    Examples:
      rca exporter kubernetes
      rca exporter kubernetes --kubeconfig ~/.kube/config --context prod --once
      rca exporter kubernetes --policy policy.yaml --state /var/lib/prioscope/state.json
    """
    rules = _load_policy(policy)
    serving = Serving("kubernetes", listen, interval, max_age, web_config, once, openmetrics, log)
    source = _kubernetes_source(kubeconfig, context, cluster, _ranking(policy, rules), gpu_only)
    _serve_cluster(serving, source, rules, state)


@app.command("file")
def file(
    recording: Annotated[
        Path, typer.Argument(help="What `rca exporter record` wrote.", show_default=False, metavar="RECORDING")
    ],
    listen: _Listen = f":{PORTS['file']}",
    interval: Annotated[
        float | None,
        typer.Option(
            "--interval",
            min=0.01,
            help="Seconds from one snapshot to the next. Default: as they were recorded.",
            show_default=False,
        ),
    ] = None,
    max_age: Annotated[
        float | None,
        typer.Option(
            "--max-age",
            min=0.1,
            help="Withhold a snapshot that is older, in seconds. Default: never; with --follow, as everywhere.",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="At the end wait for what is appended.")] = False,
    policy: _Policy = None,
    state: _State = None,
    web_config: _WebConfig = None,
    once: _Once = False,
    openmetrics: _OpenMetrics = False,
    log: _Log = LogLevel.INFO,
) -> None:
    """Play a recording: for a demo, to try a policy on what happened, and for post-mortems.

    Gives one snapshot each interval, and then goes on with the last. With --once it plays all of them, without waiting,
    and prints what the end looks like, with everything that was counted on the way.

    \b
    Examples:
      rca exporter file week.jsonl.gz --once
      rca exporter file week.jsonl.gz --interval 1 --policy policy.yaml
      rca exporter file live.jsonl --follow
    """
    import math

    from exporters.sources.file import FileSource, recorded_interval

    rules = _load_policy(policy)
    source = FileSource(recording, follow=follow and not once)
    pace = interval if interval is not None else recorded_interval(recording)
    age = max_age if max_age is not None or follow else math.inf
    serving = Serving("file", listen, pace, age, web_config, once, openmetrics, log)
    _serve_cluster(serving, lambda: source, rules, state, recorded=True)


# --- recording


@record_app.command("gpu")
def record_gpu(
    out: _Out,
    interval: _Interval = 15.0,
    polls: _Polls = None,
    append: _Append = False,
    node: _Node = None,
    allocator_socket: _AllocatorSocket = None,
    allocator_folder: _AllocatorFolder = None,
    log: _Log = LogLevel.INFO,
) -> None:
    """Record the GPUs of this machine.

    \b
    Example:
      rca exporter record gpu --out gpus.jsonl.gz --interval 5
    """
    _record(_gpu_source(node, allocator_socket, allocator_folder), out, interval, polls, append, log)


@record_app.command("slurm")
def record_slurm(
    out: _Out,
    interval: _Interval = 15.0,
    polls: _Polls = None,
    append: _Append = False,
    cluster: _SlurmCluster = None,
    rest: _Rest = None,
    user: _User = None,
    token_file: _TokenFile = None,
    api_version: _ApiVersion = None,
    preempt_type: _PreemptType = None,
    commands: _Commands = None,
    conf: _Conf = None,
    timeout: _Timeout = 30.0,
    policy: _Policy = None,
    log: _Log = LogLevel.INFO,
) -> None:
    """Record a Slurm cluster. Priority levels are those of --policy, or of the cluster's partitions and QOS.

    \b
    Example:
      rca exporter record slurm --out week.jsonl.gz
    """
    access = _SlurmAccess(rest, user, token_file, api_version, preempt_type, commands, conf, timeout, cluster)
    source = _slurm_source(access, _ranking(policy, _load_policy(policy)))
    _record(source, out, interval, polls, append, log)


@record_app.command("kubernetes")
def record_kubernetes(
    out: _Out,
    interval: _Interval = 15.0,
    polls: _Polls = None,
    append: _Append = False,
    cluster: _Cluster = "kubernetes",
    kubeconfig: _Kubeconfig = None,
    context: _Context = None,
    gpu_only: _GpuOnly = False,
    policy: _Policy = None,
    log: _Log = LogLevel.INFO,
) -> None:
    """Record a Kubernetes cluster. Priority levels are those of --policy, or of the cluster's PriorityClasses.

    \b
    Example:
      rca exporter record kubernetes --out cluster.jsonl.gz --polls 240
    """
    ranking = _ranking(policy, _load_policy(policy))
    _record(_kubernetes_source(kubeconfig, context, cluster, ranking, gpu_only), out, interval, polls, append, log)


# --- sources


def _gpu_source(node: str | None, socket: Path | None, folder: Path | None) -> Callable[[], Source]:
    from exporters.sources.nvml import NvmlSource

    allocators = None
    if socket is not None or folder is not None:
        from exporters.sources.allocator import AllocatorSource

        allocators = AllocatorSource(socket, folder)
    return lambda: NvmlSource(node=node or "", allocators=allocators)


def _slurm_source(access: _SlurmAccess, ranking: Ranking | None) -> Callable[[], Source]:
    access.check()
    if access.rest:
        _needs("httpx")
    from exporters.sources.slurm import open_slurm

    source = open_slurm(
        rest=access.rest or "",
        user=access.user or "",
        token_file=access.token_file,
        api_version=access.api_version,
        preempt_type=access.preempt_type or "",
        commands=access.commands,
        conf=access.conf,
        timeout=access.timeout,
        cluster=access.cluster or "",
        ranking=ranking,
    )
    return lambda: source


def _kubernetes_source(
    kubeconfig: Path | None, context: str | None, cluster: str, ranking: Ranking | None, gpu_only: bool
) -> Callable[[], Source]:
    _needs("kubernetes")
    from exporters.sources.kubernetes import KubernetesSource, connect

    client = connect(kubeconfig, context)

    def open_source() -> Source:
        source = KubernetesSource(client, cluster=cluster, ranking=ranking, gpu_only=gpu_only)
        # The first snapshot should be a whole one. A server that does not answer is reported by the poll.
        source.ready(timeout_seconds=30.0)
        return source

    return open_source


def _needs(module: str) -> None:
    from importlib.util import find_spec

    from exporters.errors import InvalidInputError

    if find_spec(module) is None:
        raise InvalidInputError(
            f"this exporter needs {module}, which is not installed", cure="pip install 'prioscope[exporters]'"
        )


# --- what they share


def _load_policy(policy: str | None) -> Policy:
    from exporters.policy import default_policy, load_policy

    return default_policy() if policy is None else load_policy(policy)


def _ranking(policy: str | None, rules: Policy) -> Ranking | None:
    """Only a policy that was given, and has levels, overrides what the cluster itself says about its priorities."""
    from exporters.policy import default_policy

    return None if policy is None or rules.ranking == default_policy().ranking else rules.ranking


def _logging(level: LogLevel, *, quiet: bool = False) -> None:
    import logging

    chosen = logging.CRITICAL if quiet and level is LogLevel.INFO else level.upper()
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=chosen, format=form, datefmt="%Y-%m-%dT%H:%M:%S%z")


def _serve_cluster(
    serving: Serving, source: Callable[[], Source], policy: Policy, state: Path | None, *, recorded: bool = False
) -> None:
    from exporters.collectors.cluster import ClusterCollector
    from exporters.tracker import Tracker

    # What began before a recording is part of it; before an exporter's start, another counted it.
    tracker = Tracker(grace_seconds=max(60.0, 2 * serving.interval), count_history=recorded)
    if state is not None:
        _check_state(tracker, state)
    save = None if state is None else (lambda: tracker.save_state(state))
    _serve(serving, source, ClusterCollector(policy, tracker), save)


def _check_state(tracker: Tracker, state: Path) -> None:
    from exporters.errors import InvalidInputError

    if not state.parent.is_dir():
        raise InvalidInputError(f"the folder of --state {state} does not exist", cure=f"mkdir -p {state.parent}")
    tracker.load_state(state)


def _serve(
    serving: Serving,
    open_source: Callable[[], Source],
    consumer: Consumer,
    save: Callable[[], None] | None = None,
) -> None:
    _needs("uvicorn")
    import time

    from cli.output import emit, note
    from exporters.errors import InvalidInputError
    from exporters.exposition import OPENMETRICS, TEXT, render
    from exporters.poller import Poller
    from exporters.server import Application, listen, serve, url_of
    from exporters.web_config import LiveWebConfig, WebConfig, load_web_config

    max_age = serving.max_age if serving.max_age is not None else max(60.0, 4 * serving.interval)
    if max_age <= serving.interval:
        raise InvalidInputError(
            f"--max-age {max_age:g} is not longer than --interval {serving.interval:g}",
            cure="make it some intervals long, or every snapshot would be too old",
        )
    # With --once, the error is the answer.
    _logging(serving.log, quiet=serving.once)
    poller = Poller(serving.name, open_source, consumer, interval=serving.interval, max_age=max_age, after_poll=save)
    if serving.once:
        error = _play(poller) if serving.name == "file" else poller.poll_once()
        text = render(poller.families(), OPENMETRICS if serving.openmetrics else TEXT).decode()
        poller.close()
        if error is not None:
            raise error
        emit(text)
        return
    live = LiveWebConfig(load_web_config(serving.web_config) if serving.web_config else WebConfig(), time.monotonic)
    server = listen(serving.listen)
    application = Application(poller.families, poller.status, live, title=f"Prioscope {serving.name} exporter")
    poller.start()
    note(f"serving {url_of(server, tls=live.context is not None)}")
    try:
        serve(application, live, server)
    finally:
        if not poller.stop(timeout=5.0):
            note("the last poll does not come back; leaving it")


def _play(poller: Poller) -> Exception | None:
    """Poll until the recording ends; return the first thing that went wrong."""
    from exporters.sources.base import EndOfStreamError

    try:
        while (error := poller.poll_once()) is None:
            pass
    except EndOfStreamError:
        return None
    return error


def _record(
    open_source: Callable[[], Source], out: Path, interval: float, polls: int | None, append: bool, log: LogLevel
) -> None:
    from cli.output import note
    from exporters.recorder import record

    _logging(log)
    count = record(open_source, out, interval=interval, polls=polls, append=append)
    note(f"{count:,} snapshots: {out}")


__all__ = ["app"]
