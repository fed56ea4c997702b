"""The store's promises, on both databases."""

from __future__ import annotations

import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from rca.errors import InvalidInputError, NotFoundError, SourceUnreachableError
from rca.store import (
    Alert,
    BacklogFullError,
    ConflictError,
    Filter,
    Receipt,
    Retention,
    State,
    StoredIncident,
    default_url,
    open_store,
)
from rca.store.database import SORTS, Store

NOW = datetime(2026, 1, 31, 4, 0, tzinfo=UTC)
START = datetime(2026, 1, 31, 3, 0, 0, 123456, tzinfo=UTC)
LEASE = timedelta(seconds=10)


def alert(number: int = 1, *, group: str = "g", late: float = 0.0, ended: bool = False) -> Alert:
    starts = START + timedelta(seconds=late)
    return Alert(
        group,
        f"{number:016x}",
        starts,
        starts + timedelta(minutes=5) if ended else None,
        {"alertname": "Slow", "number": str(number), "nul": "a\0b"},
        {"summary": "slow\0"},
        "http://prometheus/graph",
        "rca",
    )


def after(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def received(store: Store, *numbers: int) -> None:
    store.receive([alert(number) for number in numbers], NOW, 100)


def explained(store: Store, owner: str = "me", now: datetime = NOW) -> StoredIncident:
    """Take the next incident through all states."""
    claimed = store.claim(owner, now, LEASE)
    assert claimed is not None
    captured = store.update(claimed, {"state": State.CAPTURED, "lease_owner": ""}, now, bundle=b"zip" * 100)
    claimed = store.claim(owner, now, LEASE)
    assert claimed is not None
    assert claimed.id == captured.id
    changes = {"state": State.EXPLAINED, "lease_owner": "", "cause": "job", "confidence": 0.9}
    return store.update(claimed, changes, now, explanation=b'{"causes":[]}', trigger="alert", targets=["grafana"])


# --- alerts


def test_the_same_alert_is_one_incident_through_every_route_and_however_often(store: Store) -> None:
    first = store.receive([alert(1), alert(2)], NOW, 100)
    assert (first.accepted, first.repeated) == (2, 0)
    assert store.receive([alert(1), alert(2)], after(60), 100) == Receipt(repeated=2, incidents=first.incidents)
    assert store.receive([alert(1, group="other route")], after(60), 100).repeated == 1
    found = store.get(first.incidents[0])
    assert (found.state, found.starts_at, found.labels["nul"]) == (State.RECEIVED, START, "a\0b")
    assert [item.group_key for item in store.alerts(found.id)] == ["g", "other route"]


def test_a_new_start_is_a_new_incident_but_not_when_the_start_only_moved_back(store: Store) -> None:
    (name,) = store.receive([alert()], NOW, 100).incidents
    # A second Prometheus saw the same alert earlier: Alertmanager sends it with the earlier start from then on.
    assert store.receive([alert(late=-15)], NOW, 100).incidents == (name,)
    assert store.receive([alert(late=3600)], NOW, 100).accepted == 1


def test_the_end_is_set_once_and_an_unknown_end_is_an_incident_only_while_fresh(store: Store) -> None:
    (name,) = store.receive([alert()], NOW, 100).incidents
    assert store.receive([alert(ended=True)], NOW, 100).resolved == 1
    assert store.receive([alert(ended=True)], NOW, 100).repeated == 1
    assert store.get(name).ended_at == START + timedelta(minutes=5)
    assert store.receive([alert(2, ended=True)], START + timedelta(minutes=10), 100).resolved == 0
    assert store.receive([alert(3, ended=True)], START + timedelta(days=1), 100).ignored == 1
    assert store.waiting() == 2


def test_a_full_backlog_refuses_the_whole_webhook_and_forgets_nothing(store: Store) -> None:
    received(store, 1, 2)
    with pytest.raises(BacklogFullError, match="2 incidents wait already, of at most 2"):
        store.receive([alert(1), alert(3)], NOW, 2)
    assert sum(store.counts().values()) == 2
    # What is known already needs no place, and a large group may exceed the capacity once.
    assert store.receive([alert(1, ended=True)], NOW, 2).resolved == 1
    assert store.receive([alert(number) for number in range(3, 9)], NOW, 3).accepted == 6


# --- leases and compare-and-swap


def test_a_claimed_incident_is_nobody_elses_until_its_lease_runs_out(store: Store) -> None:
    received(store, 1)
    mine = store.claim("me", NOW, LEASE)
    assert mine is not None
    assert (mine.state, mine.attempts, mine.lease_owner) == (State.CAPTURING, 1, "me")
    assert store.claim("you", after(9), LEASE) is None
    assert store.renew(mine.id, "me", after(30))
    assert not store.renew(mine.id, "you", after(30))
    assert store.claim("you", after(29), LEASE) is None
    yours = store.claim("you", after(31), LEASE)
    assert yours is not None
    assert (yours.id, yours.attempts) == (mine.id, 2)


def test_a_late_result_does_not_overwrite_and_is_kept_as_a_conflict(store: Store) -> None:
    received(store, 1)
    slow = store.claim("slow", NOW, LEASE)
    quick = explained(store, "quick", after(11))
    assert slow is not None
    with pytest.raises(ConflictError, match="changed by another writer"):
        store.update(slow, {"state": State.CAPTURED, "victim": "wrong"}, after(12), bundle=b"wrong")
    assert store.get(slow.id) == quick
    assert store.bundle(slow.id) == b"zip" * 100
    (conflict,) = store.conflicts(slow.id)
    assert conflict.update == {"changes": {"state": "captured", "victim": "wrong"}}
    assert (conflict.base, conflict.stored) == (slow.version, quick.version)


def test_an_alert_that_ends_meanwhile_does_not_cost_the_explanation(store: Store) -> None:
    received(store, 1)
    claimed = store.claim("me", NOW, LEASE)
    assert claimed is not None
    store.receive([alert(ended=True)], NOW, 100)
    done = store.update(claimed, {"state": State.CAPTURED, "lease_owner": ""}, NOW, bundle=b"zip")
    assert done.ended_at == START + timedelta(minutes=5)
    assert done == store.get(claimed.id)
    assert store.conflicts() == ()


def test_of_many_concurrent_updates_none_is_lost(url: str) -> None:
    rounds, writers = 15, 6
    refused = 0
    lock = threading.Lock()
    with open_store(url) as first, open_store(url) as second:
        received(first, 1)
        name = first.list().items[0].id

        def write(number: int) -> None:
            nonlocal refused
            store = (first, second)[number % 2]
            for _ in range(rounds):
                while True:
                    base = store.get(name)
                    try:
                        store.update(base, {"partial": base.partial + 1}, NOW)
                    except ConflictError:
                        with lock:
                            refused += 1
                    else:
                        break

        with ThreadPoolExecutor(writers) as pool:
            list(pool.map(write, range(writers)))
        found = first.get(name)
        assert found.partial == rounds * writers
        assert sum(found.version.values()) == 1 + rounds * writers
        # Those that lost were told, and are on record.
        assert len(first.conflicts(name, limit=10_000)) == refused


def test_of_many_concurrent_claims_each_gets_its_own(url: str) -> None:
    with open_store(url) as first, open_store(url) as second:
        received(first, *range(40))

        def claim(number: int) -> str | None:
            found = (first, second)[number % 2].claim(f"owner-{number}", NOW, LEASE)
            return None if found is None else found.id

        with ThreadPoolExecutor(8) as pool:
            taken = [name for name in pool.map(claim, range(60)) if name is not None]
        # One that found only what others were taking comes again; nobody gets what another has.
        assert len(taken) == len(set(taken))
        while (rest := first.claim("last", NOW, LEASE)) is not None:
            taken.append(rest.id)
        assert sorted(taken) == sorted(item.id for item in first.list(limit=100).items)


def test_an_impossible_step_is_refused(store: Store) -> None:
    received(store, 1)
    with pytest.raises(InvalidInputError, match="is received, which does not lead to explained"):
        store.update(store.list().items[0], {"state": State.EXPLAINED}, NOW)


# --- explanations and publications


def test_a_second_explanation_stands_beside_the_first(store: Store) -> None:
    received(store, 1)
    first = explained(store)
    again = store.update(first, {"state": State.CAPTURED}, after(60))
    assert again.revision == 1
    claimed = store.claim("me", after(60), LEASE)
    assert claimed is not None
    store.update(claimed, {"state": State.INCONCLUSIVE}, after(61), explanation=b'{"other":1}', trigger="request")
    assert store.explanation(first.id, 1) == b'{"causes":[]}'
    assert store.explanation(first.id) == b'{"other":1}'
    assert [(i.revision, i.verdict, i.trigger) for i in store.explanations(first.id)] == [
        (1, "explained", "alert"),
        (2, "inconclusive", "request"),
    ]
    with pytest.raises(NotFoundError, match="has no explanation 3"):
        store.explanation(first.id, 3)


def test_a_publication_comes_again_until_it_is_done(store: Store) -> None:
    received(store, 1)
    explained(store)
    first = store.claim_publication(NOW, LEASE)
    assert first is not None
    assert (first.target, first.attempts) == ("grafana", 1)
    assert store.claim_publication(after(9), LEASE) is None
    store.publication_failed(first, after(20), "Grafana answered 502")
    second = store.claim_publication(after(21), LEASE)
    assert second is not None
    assert second.attempts == 2
    store.publication_done(second, after(22))
    assert store.claim_publication(after(9999), LEASE) is None


# --- reading


@pytest.mark.parametrize("sort", sorted(SORTS))
@pytest.mark.parametrize("ascending", [False, True])
def test_pages_show_each_incident_once_in_order(store: Store, sort: str, ascending: bool) -> None:
    received(store, *range(7))
    explained(store)
    seen: list[str] = []
    after = None
    while True:
        page = store.list(limit=3, after=after, sort=sort, ascending=ascending)
        seen += [item.id for item in page.items]
        after = page.next
        if after is None:
            break
    assert len(seen) == len(set(seen)) == 7
    if sort == "confidence":
        assert store.get(seen[-1 if ascending else 0]).confidence == 0.9


def test_a_made_up_cursor_is_refused(store: Store) -> None:
    received(store, 1)
    for cursor in ("x", "", "WzEsMl0", "eyJhIjoxfQ", "\ud800", "é"):
        with pytest.raises(InvalidInputError, match="cursor"):
            store.list(after=cursor)


def test_filters_and_names(store: Store) -> None:
    store.receive([alert(1), alert(2), alert(1, late=600)], NOW, 100)
    done = explained(store)
    assert [item.id for item in store.list(Filter(states=(State.EXPLAINED,))).items] == [done.id]
    assert [item.id for item in store.list(Filter(cause="job", alertname="Slow")).items] == [done.id]
    assert len(store.list(Filter(since=START + timedelta(seconds=1))).items) == 1
    newest = store.find("latest")
    assert newest.starts_at == START + timedelta(seconds=600)
    assert store.find(f"{1:016x}") == newest
    assert store.find(f"{1:016x}", at=START).starts_at == START
    assert store.find(newest.id) == store.find(newest.id[:20]) == newest
    for name, why in (
        ("2026", "several"),
        ("no-such", "no incident"),
        ("", "no incident"),
        ("%", "no incident"),
        ("\0", "no"),
    ):
        with pytest.raises(NotFoundError, match=why):
            store.find(name)


def test_retention_keeps_what_is_not_finished(store: Store) -> None:
    store.receive([alert(number, late=number) for number in range(5)], NOW, 100)
    for _ in range(3):
        explained(store)
    waiting = {item.id for item in store.list(Filter(states=(State.RECEIVED,))).items}
    assert store.prune(Retention(), NOW) == (0, 0)
    assert store.prune(Retention(age_seconds=1e9, count=100, size_bytes=10**9), NOW)[0] == 0
    count, held = store.prune(Retention(count=4), NOW, dry_run=True)
    assert (count, sum(store.counts().values())) == (1, 5)
    assert held > 300
    assert store.prune(Retention(size_bytes=400), NOW)[0] == 2
    assert store.prune(Retention(age_seconds=1.0), NOW)[0] == 1
    left = store.list().items
    assert {item.id for item in left} == waiting
    with pytest.raises(NotFoundError):
        store.explanation("gone")


# --- moving between stores


def test_a_copy_follows_its_original_until_both_are_changed(store: Store, tmp_path: Path) -> None:
    received(store, 1)
    original = explained(store)
    with open_store(str(tmp_path / "copy.db")) as copy:
        assert copy.add(original, NOW, bundle=b"zip")
        assert not copy.add(original, NOW, bundle=b"zip")
        newer = store.update(original, {"title": "found later"}, NOW)
        assert copy.add(newer, NOW)
        assert not copy.add(original, NOW)
        assert copy.get(original.id).title == "found later"
        here = store.update(newer, {"title": "changed here"}, NOW)
        there = copy.update(copy.get(original.id), {"title": "changed there"}, NOW)
        with pytest.raises(ConflictError, match="both here and there"):
            copy.add(here, NOW)
        assert copy.get(original.id) == there
        (conflict,) = copy.conflicts()
        assert isinstance(conflict.update["changes"], dict)
        assert conflict.update["changes"]["title"] == "changed here"


# --- opening


def test_a_store_is_private_and_is_where_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PRIOSCOPE_STORE", "STATE_DIRECTORY", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("rca.store.location._SYSTEM", tmp_path / "absent")
    assert default_url() == f"sqlite:///{tmp_path}/.local/share/prioscope/store.db"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    open_store().close()
    path = tmp_path / "data" / "prioscope" / "store.db"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/private/prioscope")
    assert default_url() == "sqlite:////var/lib/private/prioscope/store.db"


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("mysql://root:hunter2@db/x", InvalidInputError, "cannot be a mysql database"),
        ("sqlite://", InvalidInputError, "needs a file"),
        ("postgresql://u:hunter2@[::1/x", InvalidInputError, "cannot be read"),
        ("postgresql://u:hunter2@127.0.0.1:1/x", SourceUnreachableError, "does not answer"),
    ],
)
def test_a_wrong_url_is_said_without_its_password(url: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        open_store(url)
    assert "hunter2" not in str(raised.value)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    path.write_text("not a database" * 100)
    with pytest.raises(InvalidInputError, match="not a database"):
        open_store(str(path))
    with pytest.raises(NotFoundError, match="no store at"):
        open_store(str(tmp_path / "absent.db"), must_exist=True)


def test_a_record_survives_json(store: Store) -> None:
    received(store, 1)
    record = explained(store)
    assert msgspec.json.decode(msgspec.json.encode(record), type=StoredIncident) == record
