"""Playing recordings: to the end, while they grow, and when they are damaged."""

from __future__ import annotations

import contextlib
import gzip
from pathlib import Path

import pytest

from exporters.errors import InvalidInputError, NotFoundError, SourceUnreachableError
from exporters.model import Snapshot, encode, write_snapshots
from exporters.recorder import record
from exporters.sources.base import EndOfStreamError
from exporters.sources.file import FileSource, recorded_interval


def snapshot(time: float) -> Snapshot:
    return Snapshot(time, "c", "test")


def recording(folder: Path, *times: float, name: str = "r.jsonl") -> Path:
    path = folder / name
    write_snapshots(path, map(snapshot, times))
    return path


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_each_poll_gives_the_next_snapshot(tmp_path: Path, name: str) -> None:
    source = FileSource(recording(tmp_path, 1.0, 2.0, name=name))
    assert [source.poll().time, source.poll().time] == [1.0, 2.0]
    for _ in range(2):
        with pytest.raises(EndOfStreamError):
            source.poll()
    source.close()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="is not a file"):
        FileSource(tmp_path / "gone.jsonl")


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = recording(tmp_path, 1.0)
    path.write_bytes(path.read_bytes() + b"\n{}\n")
    source = FileSource(path)
    source.poll()
    with pytest.raises(InvalidInputError, match=r"r\.jsonl:3 is not a snapshot"):
        source.poll()
    source.close()


@pytest.mark.parametrize(("name", "cut"), [("r.jsonl.gz", 6), ("r.jsonl", 12)])
def test_a_recording_cut_off_by_a_crash_gives_what_it_has(
    tmp_path: Path, name: str, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = recording(tmp_path, 1.0, 2.0, name=name)
    path.write_bytes(path.read_bytes()[:-cut])
    source = FileSource(path)
    times: list[float] = []
    with contextlib.suppress(EndOfStreamError):
        for _ in range(3):
            times.append(source.poll().time)
    assert times[:1] == [1.0]
    assert f"{path} was cut off after line {len(times)}" in caplog.text


def test_following_waits_for_whole_lines(tmp_path: Path) -> None:
    path = recording(tmp_path, 1.0)
    source = FileSource(path, follow=True)
    assert source.poll().time == 1.0
    with pytest.raises(SourceUnreachableError, match="no new snapshot"):
        source.poll()
    line = encode(snapshot(2.0))
    with path.open("ab") as stream:
        stream.write(line[:10])
        stream.flush()
        with pytest.raises(SourceUnreachableError):
            source.poll()
        stream.write(line[10:] + b"\n" + b"{}\n" + encode(snapshot(3.0)))
    assert source.poll().time == 2.0
    with pytest.raises(InvalidInputError, match=r"r\.jsonl:4 is not a snapshot"):
        source.poll()
    assert source.poll().time == 3.0, "one bad line does not end it"
    source.close()


def test_a_compressed_file_cannot_be_followed(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="compressed"):
        FileSource(recording(tmp_path, 1.0, name="r.jsonl.gz"), follow=True)


@pytest.mark.parametrize(
    ("times", "seconds"),
    [((0.0, 5.0, 10.0, 100.0), 5.0), ((0.0,), 15.0), ((), 15.0), ((3.0, 3.0), 15.0)],
)
def test_the_pace_of_a_recording(tmp_path: Path, times: tuple[float, ...], seconds: float) -> None:
    assert recorded_interval(recording(tmp_path, *times)) == seconds


class Scripted:
    """A source that returns or raises what it is given."""

    def __init__(self, *steps: Snapshot | Exception) -> None:
        self.steps = list(steps)
        self.closed = False

    def poll(self) -> Snapshot:
        if not self.steps:
            raise EndOfStreamError
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_recording_skips_polls_that_fail(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / name
    source = Scripted(snapshot(1.0), SourceUnreachableError("away"), snapshot(2.0))
    assert record(lambda: source, out, interval=0.0) == 2
    with contextlib.closing(FileSource(out)) as player:
        assert [player.poll().time, player.poll().time] == [1.0, 2.0]
    assert "not recorded: away" in caplog.text
    assert source.closed


def test_what_was_recorded_can_be_read_before_the_end(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl.gz"
    seen: list[float] = []

    class Peeking(Scripted):
        def poll(self) -> Snapshot:
            if out.exists():
                with gzip.open(out) as stream, contextlib.suppress(EOFError):
                    seen.extend(1.0 for line in stream if line.strip())
            return super().poll()

    record(lambda: Peeking(snapshot(1.0), snapshot(2.0)), out, interval=0.0)
    assert seen, "the first snapshot is on disk when the second is made"


def test_the_first_failure_ends_a_recording(tmp_path: Path) -> None:
    source = Scripted(SourceUnreachableError("away"))
    with pytest.raises(SourceUnreachableError):
        record(lambda: source, tmp_path / "out.jsonl", interval=0.0)
    assert source.closed


def test_a_recording_is_not_overwritten(tmp_path: Path) -> None:
    out = recording(tmp_path, 1.0)
    with pytest.raises(InvalidInputError, match="exists"):
        record(lambda: Scripted(snapshot(2.0)), out, interval=0.0)
    assert record(lambda: Scripted(snapshot(2.0)), out, interval=0.0, append=True) == 1
    with contextlib.closing(FileSource(out)) as source:
        assert [source.poll().time, source.poll().time] == [1.0, 2.0]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="cannot write"):
        record(lambda: Scripted(snapshot(1.0)), tmp_path / "no" / "out.jsonl", interval=0.0)
