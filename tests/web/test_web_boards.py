"""The boards in Chromium, drawn by Grafana's own packages with the data of the demo cluster.

`npm ci` and a build with Vite come first; both are skipped when nothing changed. Screenshots go to ``out/boards``.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from urllib.request import urlopen

import pytest

from dashboards.build import build
from tests.support.demo_stack import demo_stack
from tests.support.services import HOST, absent, free_port, program, wait_for

pytestmark = [pytest.mark.services, pytest.mark.slow]

WEB = Path(__file__).parent
SCREENSHOTS = WEB.parents[1] / "out" / "boards"
NODE = (20, 19)

BOARDS = list(build())

#: What Grafana shows for a series that nobody named.
LABEL_SOUP = re.compile(r'__name__|\{\w+="')

Seen = dict[str, Any]


def attempt(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this folder."""
    environment = {**os.environ, "NODE_ENV": "production"}
    return subprocess.run(command, cwd=WEB, env=environment, capture_output=True, text=True, timeout=300, check=False)


def run(*command: str) -> str:
    """Run a command in this folder, which must succeed, and return what it prints."""
    done = attempt(*command)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def digest(*paths: Path) -> str:
    """Return a hash of the content of files."""
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sorted(paths))).hexdigest()


def unless_done(stamp: Path, content: str) -> bool:
    """Whether ``stamp`` does not hold ``content`` yet."""
    return not stamp.is_file() or stamp.read_text() != content


def build_page() -> None:
    """Build the host page, in ``dist``."""
    node = program("node")
    version = run(node, "--version").strip()
    if tuple(map(int, version.removeprefix("v").split(".")[:2])) < NODE:
        absent(f"node is {version}; Vite needs {NODE[0]}.{NODE[1]} or later")
    npm = program("npm")
    packages = digest(WEB / "package-lock.json")
    if unless_done(stamp := WEB / "node_modules" / ".installed", packages):
        # With what is needed to build, whatever NODE_ENV says.
        installed = attempt(npm, "ci", "--include=dev", "--loglevel=error")
        if installed.returncode != 0:
            absent(f"`npm ci` needs the network the first time: {installed.stderr[-1000:]}")
        stamp.write_text(packages)
    sources = digest(WEB / "package-lock.json", WEB / "vite.config.ts", WEB / "index.html", *(WEB / "src").iterdir())
    if unless_done(stamp := WEB / "dist" / ".built", sources):
        run(npm, "run", "check")
        run(npm, "run", "build")
        stamp.write_text(sources)


@contextmanager
def server(prometheus: str) -> Iterator[str]:
    """Serve the page, the boards and ``prometheus``; give the address."""
    port = free_port()
    command = [program("node"), "node_modules/vite/bin/vite.js", "preview", "--port", str(port)]
    # The demo's history has a sample each 15 s, and rates must span several.
    environment = {**os.environ, "PROMETHEUS_URL": prometheus, "SCRAPE_INTERVAL": "15s"}
    process = subprocess.Popen(
        command, cwd=WEB, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    address = f"http://{HOST}:{port}"

    def answers() -> bool:
        assert process.poll() is None, process.communicate()[0]
        try:
            with urlopen(f"{address}/api/search") as answer:  # noqa: S310 - http, on loopback
                return bool(answer.status == 200)
        except OSError:
            return False

    try:
        wait_for(answers, "the page's server", timeout=60)
        yield address
    finally:
        process.terminate()
        process.communicate(timeout=20)


@dataclass(frozen=True)
class Session:
    """What was seen: each board in both themes, and the way from Fleet to a pod."""

    looks: list[Seen]
    drill: dict[str, Any]


def watch(folder: Path) -> str:
    """Start everything, look at the boards and click through them; return what was seen, as JSON."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        absent("not installed: chromium (scripts/ci_services.sh installs it)")
    program("node")
    with demo_stack(folder) as prometheus:
        build_page()
        shutil.rmtree(SCREENSHOTS, ignore_errors=True)
        # What has no history needs two samples before the last whole step.
        young = "prioscope_scrape_duration_seconds_count"
        wait_for(lambda: prometheus.query(f"count_over_time({young}[1m] offset 15s) > 1"), f"two samples of {young}")
        with server(prometheus.url) as address:
            return run(program("node"), "drive.mjs", str(chromium), address, str(SCREENSHOTS), *BOARDS)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    # Test processes share what one of them saw: a minute of two cores is enough.
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    seen = shared / "boards.json"
    with (shared / "boards.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not seen.exists():
            seen.write_text(watch(tmp_path_factory.mktemp("demo")))
    return Session(**json.loads(seen.read_text()))


def test_every_board_is_drawn_without_an_error(session: Session) -> None:
    assert [(look["uid"], look["theme"]) for look in session.looks] == [
        (uid, theme) for theme in ("dark", "light") for uid in BOARDS
    ]
    for look in session.looks:
        assert look["errors"] == [], look["name"]
        assert look["unsupported"] == [], look["name"]
        assert [panel["error"] for panel in look["panels"] if panel["error"]] == [], look["name"]
        assert Path(look["screenshot"]).stat().st_size > 10_000
    themes = ("dark", "light")
    backgrounds = {theme: {look["background"] for look in session.looks if look["theme"] == theme} for theme in themes}
    assert backgrounds == {"dark": {"rgb(17, 18, 23)"}, "light": {"rgb(251, 251, 251)"}}


def test_no_panel_is_empty(session: Session) -> None:
    # Everything that the boards show happens in the demo cluster.
    empty = [
        f"{look['name']}: {panel['title']}"
        for look in session.looks
        for panel in look["panels"]
        if panel["type"] != "text" and (panel["empty"] or panel["rows"] == 0)
    ]
    assert empty == []


def test_everything_has_a_name_and_titles_fit(session: Session) -> None:
    for look in session.looks:
        for panel in look["panels"]:
            assert not LABEL_SOUP.search(panel["text"]), f"{look['name']}: {panel['text']}"
            assert not panel["titleCut"], f"{look['name']}: {panel['title']}"
            assert "$" not in panel["title"]


def test_panels_that_are_not_on_npm_say_so(session: Session) -> None:
    panels = [panel for look in session.looks for panel in look["panels"]]
    assert {panel["type"] for panel in panels if panel["standIn"]} == {"nodeGraph", "state-timeline"}
    assert all(panel["standIn"] or panel["drawn"] for panel in panels)


def test_the_call_graph_has_the_fields_that_the_node_graph_looks_for(session: Session) -> None:
    graphs = [panel["frames"] for look in session.looks for panel in look["panels"] if panel["type"] == "nodeGraph"]
    assert graphs
    for nodes, edges in graphs:
        assert {"id", "title", "subtitle", "mainstat"} <= nodes.keys()
        assert {"id", "source", "target", "mainstat"} <= edges.keys()
        # An edge to nowhere makes the whole panel an error.
        assert {*edges["source"], *edges["target"]} <= set(nodes["id"])


def query(url: str) -> dict[str, list[str]]:
    """Return the parameters of a URL."""
    return parse_qs(urlsplit(url).query)


def test_from_a_cell_of_the_fleet_to_a_pods_data(session: Session) -> None:
    drill, clicked = session.drill, session.drill["clicked"]
    kept = {"var-datasource": ["second"], "from": ["now-30m"], "to": ["now"]}
    for step in ("fleet", "service", "pod"):
        assert kept.items() <= query(drill[step]["url"]).items(), step
        assert drill[step]["errors"] == []

    service = drill["service"]
    assert urlsplit(service["url"]).path == "/d/prioscope-service"
    assert query(service["url"])["var-service"] == [clicked["service"]]
    assert query(service["url"])["var-priority"] == [clicked["level"]]
    assert clicked["service"] in service["text"]
    headings, *rows = [[cell["text"] for cell in row] for row in drill["pods"]]
    shown = {(row[headings.index("Service")], row[headings.index("Priority")]) for row in rows}
    assert shown == {(clicked["service"], clicked["level"])}

    pod = drill["pod"]
    assert urlsplit(pod["url"]).path == "/d/prioscope-pod"
    assert query(pod["url"])["var-pod"] == [clicked["pod"]]
    panels = {panel["title"]: panel for panel in pod["panels"]}
    assert panels["State"]["text"].splitlines()[1] == "In violation"
    assert re.search(r"\d", panels["In violation for"]["text"])
    assert clicked["pod"] in panels["What happened"]["text"]
    others = {row[headings.index("Pod or job")] for row in rows} - {clicked["pod"]}
    assert not [other for other in others if other in pod["text"]]

    # The browser's way back leads to the same service.
    assert query(drill["back"])["var-service"] == [clicked["service"]]
