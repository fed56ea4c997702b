"""What the server promises whatever happens: no alert that was taken is lost, and none is explained twice.

Real processes, a real database file and a real PostgreSQL. Captures come from a folder of bundles (``--bundles``).
"""

from __future__ import annotations

import contextlib
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rca.incident import Incident
from rca.store import State, open_store
from tests.support.postgres import postgres
from tests.support.services import wait_for
from tests.support.serving import ServeProcess, deliver, serving, webhook

pytestmark = [pytest.mark.services, pytest.mark.slow]

Record = Callable[[str, object], None]


@pytest.fixture
def bundles(tmp_path: Path, incident: Incident) -> Path:
    folder = tmp_path / "bundles"
    folder.mkdir()
    incident.write(folder / "small.zip")
    return folder


#: Writes down whatever happens to the table of explanations, so that an overwritten one cannot hide.
AUDIT = """
CREATE TABLE audit (what TEXT, incident TEXT, revision INTEGER);
CREATE TRIGGER audit_insert AFTER INSERT ON explanations
  BEGIN INSERT INTO audit VALUES ('insert', new.incident_id, new.revision); END;
CREATE TRIGGER audit_update AFTER UPDATE ON explanations
  BEGIN INSERT INTO audit VALUES ('update', new.incident_id, new.revision); END;
CREATE TRIGGER audit_delete AFTER DELETE ON explanations
  BEGIN INSERT INTO audit VALUES ('delete', old.incident_id, old.revision); END;
"""


def test_killed_at_fifty_points_nothing_is_lost_or_explained_twice(
    tmp_path: Path, bundles: Path, record_property: Record
) -> None:
    alerts, kills = 200, 50
    chance = random.Random(4711)
    path = tmp_path / "store.db"
    open_store(str(path)).close()
    with sqlite3.connect(path) as connection:
        connection.executescript(AUDIT)
    connection.close()
    taken: list[int] = []

    def send() -> None:
        for number in range(alerts):
            deliver(server.url, webhook(number))
            taken.append(number)
            # Spread over the kills, and in bursts, so that there is always work under way.
            time.sleep(chance.choice((0.0, 0.0, 0.0, 0.0, 1.2)))

    begun = time.monotonic()
    states: dict[State, int] = dict.fromkeys(State, 0)
    with (
        serving(tmp_path, "--bundles", bundles, "--lease", "1s", started=False) as server,
        open_store(str(path)) as store,
    ):
        sender = threading.Thread(target=send)
        sender.start()
        for _ in range(kills):
            server.spawn()
            # From before it listens, over receiving, capturing and explaining, to idling.
            time.sleep(chance.uniform(0.3, 2.2))
            server.kill()
            for state, number in store.counts().items():
                states[state] += number
        server.start()
        sender.join(120)
        assert len(taken) == alerts
        wait_for(lambda: store.waiting() == 0, "all explanations", server.log, 120)
        assert server.stop() == 0
        ids = {item.id for item in store.list(limit=1000).items}
        assert len(ids) == alerts
        assert {item.state for item in store.list(limit=1000).items} <= {State.EXPLAINED, State.INCONCLUSIVE}
        for name in ids:
            (info,) = store.explanations(name)
            assert (info.revision, info.trigger) == (1, "alert")
    with sqlite3.connect(path) as connection:
        audit = connection.execute("SELECT what, incident, revision FROM audit").fetchall()
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
    assert {what for what, _, _ in audit} == {"insert"}
    assert sorted(name for _, name, _ in audit) == sorted(ids)
    # The kills did come in the middle of work.
    assert states[State.CAPTURING] + states[State.EXPLAINING] > 0
    record_property("seconds", round(time.monotonic() - begun, 1))
    record_property("states seen after kills", {state.value: number for state, number in states.items() if number})


def memory(server: ServeProcess) -> dict[str, float]:
    """Highest resident memory so far, MiB: of the server, and of all its processes together."""
    assert server.process is not None
    own = server.process.pid
    children = [pid for path in Path(f"/proc/{own}/task").glob("*/children") for pid in path.read_text().split()]
    found = {}
    for pid in (str(own), *children):
        # A child may end meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    found[pid] = int(line.split()[1]) / 1024
    return {"server": found[str(own)], "all": sum(found.values())}


def test_a_thousand_webhooks_in_ten_seconds(tmp_path: Path, bundles: Path, record_property: Record) -> None:
    count, seconds, capacity = 1000, 10.0, 150
    with serving(tmp_path, "--bundles", bundles, "--queue", str(capacity)) as server, open_store(server.store) as store:
        begun = time.monotonic()
        longest = 0
        used = {"server": 0.0, "all": 0.0}

        def send(number: int) -> tuple[int, float]:
            time.sleep(max(begun + number * seconds / count - time.monotonic(), 0.0))
            late = time.monotonic() - begun - number * seconds / count
            return deliver(server.url, webhook(number)), late

        with ThreadPoolExecutor(100) as pool:
            futures = [pool.submit(send, number) for number in range(count)]
            while not all(future.done() for future in futures):
                longest = max(longest, store.waiting())
                used = {name: max(value, used[name]) for name, value in memory(server).items()}
                time.sleep(0.2)
        refusals = sum(future.result()[0] for future in futures)
        taken = time.monotonic() - begun
        assert sum(store.counts().values()) == count
        # Webhooks that are under way together may each find the last place; no more than connections are served.
        assert longest <= capacity + 40
        wait_for(lambda: store.waiting() == 0, "all explanations", server.log, 120)
        explained = time.monotonic() - begun
        assert store.counts()[State.FAILED] == 0
        assert used["server"] < 400
        assert used["all"] < 1500
        record_property("webhooks taken after", round(taken, 1))
        record_property("refused with 503 and sent again", refusals)
        record_property("explained after", round(explained, 1))
        record_property("memory, MiB", {name: round(value) for name, value in used.items()})


def test_two_servers_on_one_postgresql_lose_no_update(tmp_path: Path, bundles: Path, record_property: Record) -> None:
    """Both get every webhook, as from two Alertmanagers, alerts end while they are being explained, one is killed."""
    count = 100
    options = ("--bundles", bundles, "--lease", "2s")
    with (
        postgres() as url,
        serving(tmp_path, *options, store=url) as one,
        serving(tmp_path, *options, store=url) as other,
        open_store(url) as store,
        ThreadPoolExecutor(16) as pool,
    ):
        work = []
        for number in range(count):
            for server in (one, other):
                work.append(pool.submit(deliver, server.url, webhook(number)))
            for server in (other, one):
                work.append(pool.submit(deliver, server.url, webhook(number, resolved=True)))
        time.sleep(1.0)
        one.kill()
        one.start()
        for item in work:
            item.result()
        wait_for(lambda: store.waiting() == 0, "all explanations", one.log, 90)
        found = store.list(limit=1000).items
        assert len(found) == count
        assert {item.state for item in found} <= {State.EXPLAINED, State.INCONCLUSIVE}
        # The end came from the webhook, the cause from a worker: neither update overwrote the other.
        assert [item for item in found if item.ended_at is None or item.confidence is None] == []
        for item in found:
            (info,) = store.explanations(item.id)
            assert info.revision == 1
            # Each server's alert was counted.
            (alert,) = store.alerts(item.id)
            assert alert.ends_at == item.ended_at
        record_property("updates", sum(sum(item.version.values()) for item in found))
        record_property("conflicts kept", len(store.conflicts()))


def test_sigterm_gives_the_work_back(tmp_path: Path, bundles: Path) -> None:
    with serving(tmp_path, "--bundles", bundles) as server:
        for number in range(30):
            deliver(server.url, webhook(number))
        assert server.stop() == 0
        with open_store(server.store) as store:
            assert not any(item.lease_owner for item in store.list(limit=100).items)
            assert sum(store.counts().values()) == 30
        server.start()
        with open_store(server.store) as store:
            wait_for(lambda: store.waiting() == 0, "the rest", server.log, 60)
