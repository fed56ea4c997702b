"""How Slurm is asked: its commands, and slurmrestd over HTTP, with all that may go wrong."""

from __future__ import annotations

import json
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from exporters.errors import InvalidInputError, SourceUnreachableError
from exporters.model import Snapshot
from exporters.sources.slurm import SlurmSource, open_slurm
from exporters.sources.slurm.commands import CommandReader, clean_environment
from exporters.sources.slurm.reader import Remembered
from exporters.sources.slurm.rest import RestReader

CAPTURE = Path(__file__).parents[1] / "fixtures" / "slurm" / "22.05"


def poll(**options: Any) -> Snapshot:
    """One poll of a source that is opened for it."""
    with open_slurm(**options) as source:
        return source.poll()


# --- commands


class Commands:
    """A folder with commands that print what a test says; each call is logged with some of its environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.log = folder / "log"
        self.cases: dict[str, list[str]] = {}

    def add(self, command: str, action: str) -> None:
        """Let ``squeue --json`` (its first words) do ``action``, a line of shell; the first that matches is taken."""
        program, _, arguments = command.partition(" ")
        self.cases.setdefault(program, []).append(f"*' {arguments} '*) {action} ;;")
        script = [
            "#!/bin/sh",
            f'echo "{program} $* LC_ALL=$LC_ALL TIME=$SLURM_TIME_FORMAT FORMAT=$SQUEUE_FORMAT" >> {self.log}',
            'case " $* " in',
            *self.cases[program],
            f"*) echo '{program}: no such thing' >&2; exit 1 ;;",
            "esac",
        ]
        path = self.folder / program
        path.write_text("\n".join(script) + "\n")
        path.chmod(0o755)

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    """Slurm 22.05 as it was captured."""
    found = Commands(tmp_path / "bin")
    found.add("squeue --version", "echo slurm-wlm 22.05.8")
    found.add("squeue --json", f"cat {CAPTURE}/squeue.json")
    found.add("sinfo --json", f"cat {CAPTURE}/sinfo.json")
    for what, file in (
        ("job", "jobs"),
        ("node", "nodes"),
        ("partition", "partitions"),
        ("reservation", "reservations"),
    ):
        found.add(f"scontrol show {what}", f"cat {CAPTURE}/{file}.txt")
    found.add("scontrol show config", f"cat {CAPTURE}/config.txt")
    return found


def test_commands_are_asked_once_a_poll_and_settings_now_and_then(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    monkeypatch.setenv("LC_TIME", "de_DE.UTF-8")
    with open_slurm(commands=commands.folder) as source:
        first, second = source.poll(), source.poll()
    assert (first.cluster, len(first.workloads), len(first.nodes)) == ("loopback", 24, 6)
    assert len(second.workloads) == 24
    calls = [call.split(" LC_ALL=")[0] for call in commands.calls()]
    assert calls == [
        "squeue --version",
        "squeue --json --local --all --states=all",
        "sinfo --json --local --all",
        "scontrol show partition",
        "scontrol show reservation",
        "scontrol show config",
        "squeue --json --local --all --states=all",
        "sinfo --json --local --all",
        "scontrol show partition",
        "scontrol show reservation",
    ]
    # Whatever the exporter was started with, Slurm sees this.
    assert {call.split(" LC_ALL=")[1] for call in commands.calls()} == {"C TIME=%s FORMAT="}


def test_only_what_says_where_the_cluster_is_reaches_slurm() -> None:
    given = {"SLURM_CONF": "/etc/x", "SLURM_JOB_ID": "7", "SINFO_FORMAT": "%n", "LANG": "de_DE", "PATH": "/bin"}
    assert clean_environment(given) == {
        "SLURM_CONF": "/etc/x",
        "PATH": "/bin",
        "LC_ALL": "C",
        "SLURM_TIME_FORMAT": "%s",
        "SLURM_BITSTR_LEN": "0",
    }


def test_from_23_02_on_nodes_come_from_scontrol(tmp_path: Path) -> None:
    commands = Commands(tmp_path / "bin")
    commands.add("squeue --version", "echo slurm 23.11.4")
    commands.add("squeue --json", f"cat {CAPTURE}/squeue.json")
    commands.add("scontrol show nodes --json", f"cat {CAPTURE}/sinfo.json")
    commands.add("scontrol show partition", f"cat {CAPTURE}/partitions.txt")
    commands.add("scontrol show reservation", "true")
    commands.add("scontrol show config", "echo AccountingStorageType = accounting_storage/slurmdbd")
    commands.add(
        "sacctmgr --parsable2 --readonly show qos",
        "printf 'Name|Priority|Preempt|PreemptMode\\nnormal|0||cluster\\nvip|10|normal|cluster\\n'",
    )
    dump = CommandReader(folder=commands.folder).read()
    assert dump.nodes is not None
    assert len(dump.nodes.items) == 6
    assert [item.name for item in dump.qos or ()] == ["normal", "vip"]
    assert not dump.unread


@pytest.mark.parametrize(
    "failure",
    [
        "echo \"squeue: unrecognized option '--json'\" >&2; exit 1",
        "echo 'error: could not find serializer plugin' >&2; exit 1",
    ],
)
def test_a_slurm_that_cannot_write_json_is_read_as_text(commands: Commands, failure: str) -> None:
    expected = poll(commands=commands.folder)
    for program in ("squeue", "sinfo"):
        commands.cases[program] = [case for case in commands.cases[program] if "--json" not in case]
        commands.add(f"{program} --json", failure)
    source = open_slurm(commands=commands.folder)
    found = source.poll()
    assert found.nodes == expected.nodes
    assert {w.id: w for w in found.workloads} == {w.id: w for w in expected.workloads}
    before = len(commands.calls())
    source.poll()
    assert not any("--json" in call for call in commands.calls()[before:])


def test_an_old_slurm_is_not_asked_for_json(commands: Commands) -> None:
    commands.cases["squeue"] = []
    commands.add("squeue --version", "echo slurm 20.11.9")
    assert len(poll(commands=commands.folder).workloads) == 24
    assert not any("--json" in call for call in commands.calls())


def test_a_part_that_fails_is_said_and_the_rest_stays(commands: Commands) -> None:
    commands.cases["sinfo"] = []
    commands.add("sinfo --json", "echo 'slurm_load_node: Zero Bytes were transmitted' >&2; exit 1")
    found = poll(commands=commands.folder)
    assert len(found.workloads) == 24
    assert found.lacks("nodes")
    assert "Zero Bytes" in next(item.why for item in found.unread if item.what == "nodes")


def test_a_command_that_hangs_is_killed_with_its_children(commands: Commands, tmp_path: Path) -> None:
    commands.cases["squeue"] = commands.cases["squeue"][:1]
    commands.add("squeue --json", f"sleep 60 & echo $! > {tmp_path}/child; wait")
    started = time.monotonic()
    found = poll(commands=commands.folder, timeout=0.5)
    assert time.monotonic() - started < 10
    assert found.lacks("workloads")
    assert "does not end within 0.5 s" in found.unread[0].why
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the command's child is still running"
        time.sleep(0.05)


def test_without_slurm_there_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SourceUnreachableError, match=f"squeue is not in {tmp_path}") as caught:
        poll(commands=tmp_path)
    assert "slurm-client" in caught.value.cure


def test_a_controller_that_is_down_is_one_error(commands: Commands) -> None:
    for program in ("squeue", "sinfo"):
        commands.cases[program] = commands.cases[program][: program == "squeue"]
        commands.add(f"{program} --json", "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1")
    source = open_slurm(commands=commands.folder)
    with pytest.raises(SourceUnreachableError, match="Unable to contact slurm controller") as caught:
        source.poll()
    assert "slurmctld" in caught.value.cure


def test_settings_that_fail_once_are_kept_from_before() -> None:
    answers: list[object] = ["first", SourceUnreachableError("away"), "second"]
    now = [0.0]

    def read() -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    remembered = Remembered(read, seconds=300, clock=lambda: now[0])
    assert remembered.get() == "first"
    now[0] = 299.0
    assert remembered.get() == "first"
    now[0] = 301.0
    assert remembered.get() == "first"
    assert remembered.get() == "second"


def test_a_closed_source_says_so(commands: Commands) -> None:
    source = open_slurm(commands=commands.folder)
    source.close()
    with pytest.raises(SourceUnreachableError, match="is closed"):
        source.poll()


# --- slurmrestd

Answer = tuple[int, bytes]


class Rest:
    """A slurmrestd that answers as a test says."""

    def __init__(self, version: int = 38, *, described: bool = True) -> None:
        self.version = version
        self.described = described
        self.accepts = ""
        self.delay = 0.0
        self.drip = 0.0
        self.overrides: dict[str, Answer] = {}
        self.requests: list[str] = []

    def answer(self, path: str, headers: dict[str, str]) -> Answer:
        self.requests.append(path)
        if self.accepts and headers.get("x-slurm-user-token") != self.accepts:
            error = {"description": "Authentication failure", "error": "Protocol authentication error"}
            return 401, json.dumps({"errors": [error]}).encode()
        what = path.strip("/").split("/")[-1]
        if what in self.overrides:
            return self.overrides[what]
        if path == "/openapi/v3":
            paths = [f"/slurm/v0.0.{self.version}/{name}" for name in ("jobs", "nodes", "partitions", "ping")]
            return (200, json.dumps({"paths": {name: {} for name in paths}}).encode()) if self.described else (404, b"")
        files = {"jobs": "squeue", "nodes": "sinfo", "partitions": "partitions", "reservations": "reservations"}
        if path.startswith(f"/slurm/v0.0.{self.version}/") and what in files:
            return 200, (CAPTURE / f"{files[what]}.json").read_bytes()
        if path.startswith(f"/slurm/v0.0.{self.version}/") and what == "ping":
            return 200, b'{"pings": [], "errors": []}'
        return 404, b"<html>not found</html>"


class UnixServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., str]]:
    servers: list[socketserver.BaseServer] = []

    def start(rest: Rest, *, unix: bool = False) -> str:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = not unix

            def do_GET(self) -> None:
                status, body = rest.answer(self.path, {name.lower(): value for name, value in self.headers.items()})
                time.sleep(rest.delay)
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                try:
                    for at in range(0, len(body), 1 if rest.drip else 1 << 20):
                        self.wfile.write(body[at : at + (1 if rest.drip else 1 << 20)])
                        self.wfile.flush()
                        time.sleep(rest.drip)
                except OSError:
                    self.close_connection = True

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def address_string(self) -> str:
                return "client"

        server: socketserver.BaseServer
        if unix:
            path = tmp_path / "r.sock"
            server, address = UnixServer(str(path), Handler), f"unix:{path}"
        else:
            web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
            server, address = web, f"http://127.0.0.1:{web.server_port}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return address

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def closing() -> Iterator[Callable[[SlurmSource], SlurmSource]]:
    """Closes the sources that it is given at the end of the test."""
    with ExitStack() as stack:
        yield stack.enter_context


@pytest.mark.parametrize("version", range(38, 45))
@pytest.mark.parametrize("described", [True, False], ids=["described", "probed"])
def test_every_version_is_found(serve: Callable[..., str], version: int, described: bool) -> None:
    rest = Rest(version, described=described)
    with open_slurm(rest=serve(rest), preempt_type="preempt/partition_prio") as source:
        found = source.poll()
        assert (len(found.workloads), len(found.nodes), found.unread[1:]) == (24, 6, ())
        asked = len(rest.requests)
        source.poll()
    # Jobs, nodes, partitions, reservations; and QOS, which there are none of, is tried again.
    assert rest.requests[asked:] == [
        f"/slurm/v0.0.{version}/{what}" for what in ("jobs", "nodes", "partitions", "reservations")
    ] + [f"/slurmdb/v0.0.{version}/qos"]


def test_a_unix_socket(serve: Callable[..., str]) -> None:
    with open_slurm(rest=serve(Rest(41), unix=True), cluster="mine") as source:
        found = source.poll()
    assert (found.cluster, len(found.workloads)) == ("mine", 24)
    assert [item.what for item in found.unread] == ["configuration", "nodes: gpu models"]
    assert found.workloads[0].preemptible is None


@pytest.mark.parametrize(("version", "said"), [(36, "0.0.36"), (45, "0.0.45")])
def test_a_version_that_is_not_understood(serve: Callable[..., str], version: int, said: str) -> None:
    with pytest.raises(SourceUnreachableError, match=f"offers API versions {said}") as caught:
        poll(rest=serve(Rest(version)))
    assert "openapi/" in caught.value.cure


def test_a_version_that_was_asked_for_is_used_or_missed(serve: Callable[..., str]) -> None:
    address = serve(Rest(40))
    assert len(poll(rest=address, api_version=40).nodes) == 6
    with pytest.raises(SourceUnreachableError, match=r"needed is 0\.0\.41"):
        poll(rest=address, api_version=41)


def test_tokens_are_sent_and_read_anew(
    serve: Callable[..., str], closing: Callable[[SlurmSource], SlurmSource], tmp_path: Path
) -> None:
    rest = Rest(41)
    rest.accepts = "first"
    address = serve(rest)
    file = tmp_path / "token"
    file.write_text("SLURM_JWT=first\n")
    source = closing(open_slurm(rest=address, user="ann", token_file=file))
    assert len(source.poll().workloads) == 24
    rest.accepts = "second"
    with pytest.raises(SourceUnreachableError, match="refuses the token \\(401: Authentication failure") as caught:
        source.poll()
    assert "renew" in caught.value.cure
    file.write_text("second")
    assert len(source.poll().workloads) == 24
    with pytest.raises(SourceUnreachableError, match="a request without a token"):
        poll(rest=address)
    file.unlink()
    with pytest.raises(SourceUnreachableError, match="token cannot be read: No such file"):
        source.poll()


def test_a_token_of_the_environment(serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    rest = Rest(41)
    rest.accepts = "environment"
    monkeypatch.setenv("SLURM_JWT", "environment")
    assert len(poll(rest=serve(rest)).workloads) == 24
    with pytest.raises(InvalidInputError, match="the token is not one word"):
        RestReader("http://127.0.0.1:1", token=" ".join(("two", "words")))


@pytest.mark.parametrize("address", ["slurm:6820", "ftp://slurm", "http://", ""])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(InvalidInputError, match="is not the address of a slurmrestd"):
        RestReader(address)


def test_a_server_that_is_away_and_comes_back_newer(
    serve: Callable[..., str], closing: Callable[[SlurmSource], SlurmSource]
) -> None:
    rest = Rest(40)
    source = closing(open_slurm(rest=serve(rest)))
    assert len(source.poll().workloads) == 24
    rest.overrides["jobs"] = rest.overrides["nodes"] = (500, b'{"errors": [{"description": "slurmctld is down"}]}')
    with pytest.raises(SourceUnreachableError, match="status 500: slurmctld is down"):
        source.poll()
    rest.overrides.clear()
    rest.version = 43
    assert len(source.poll().workloads) == 24
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(SourceUnreachableError, match="Connection refused"):
        poll(rest=f"http://127.0.0.1:{port}")
    with pytest.raises(SourceUnreachableError, match="/nonexistent/socket does not exist"):
        poll(rest="unix:/nonexistent/socket")


@pytest.mark.parametrize(("delay", "drip"), [(5.0, 0.0), (0.0, 0.01)], ids=["silent", "dripping"])
def test_a_slow_server_is_given_up(serve: Callable[..., str], delay: float, drip: float) -> None:
    rest = Rest(41)
    rest.delay, rest.drip = delay, drip
    started = time.monotonic()
    with pytest.raises(SourceUnreachableError, match=r"does not answer within 0\.4 s"):
        poll(rest=serve(rest), timeout=0.4)
    assert time.monotonic() - started < 3


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((200, b"not json"), "not JSON"),
        ((200, b'{"errors": [], "jobs": null}'), "holds no list of jobs"),
        ((200, b'{"errors": [{"description": "Unable to query jobs"}], "jobs": []}'), "Unable to query jobs"),
        ((503, b"<html>busy</html>"), "status 503"),
        ((302, b""), "status 302"),
    ],
)
def test_an_answer_that_is_none_is_said_and_the_rest_stays(serve: Callable[..., str], answer: Answer, why: str) -> None:
    rest = Rest(41)
    rest.overrides["jobs"] = answer
    found = poll(rest=serve(rest))
    assert len(found.nodes) == 6
    assert found.lacks("workloads")
    assert why in next(item.why for item in found.unread if item.what == "workloads")


def test_qos_come_from_accounting_and_are_missed_only_where_jobs_have_one(serve: Callable[..., str]) -> None:
    rest = Rest(41)
    job = {"job_id": 1, "qos": "vip", "partition": "low", "job_state": ["PENDING"], "priority": 5}
    rest.overrides["jobs"] = (200, json.dumps({"jobs": [job], "errors": []}).encode())
    address = serve(rest)
    assert "qos" in [item.what for item in poll(rest=address).unread]
    rest.overrides["qos"] = (
        200,
        b'{"qos": [{"name": "vip", "priority": {"set": true, "infinite": false, "number": 9}}]}',
    )
    found = poll(rest=address)
    assert "qos" not in [item.what for item in found.unread]
    assert found.workloads[0].priority_class == "vip"


def test_an_environment_proxy_is_not_used(serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    assert os.environ["HTTP_PROXY"]
    assert len(poll(rest=serve(Rest(41))).nodes) == 6


def test_a_source_works_with_any_reader(commands: Commands) -> None:
    source = SlurmSource(CommandReader(folder=commands.folder), cluster="c", clock=lambda: 1796101785.0)
    found = source.poll()
    assert (found.time, found.source, found.cluster) == (1796101785.0, "slurm", "c")
