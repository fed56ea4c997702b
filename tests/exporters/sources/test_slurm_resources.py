"""Host lists, array tasks and resources in Slurm's spellings."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters.errors import InvalidInputError
from exporters.sources.slurm.hostlist import expand, task_ids
from exporters.sources.slurm.tres import Gpus, Gres, amount, gpus_of, gpus_of_tres, parse_gres, parse_tres


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("(null)", []),
        ("None assigned", []),
        ("gpu1", ["gpu1"]),
        ("gpu[1-3]", ["gpu1", "gpu2", "gpu3"]),
        ("gpu[1,3-4],cpu7", ["gpu1", "gpu3", "gpu4", "cpu7"]),
        ("n[008-011]", ["n008", "n009", "n010", "n011"]),
        ("r[1-2]n[01-02]-ib", ["r1n01-ib", "r1n02-ib", "r2n01-ib", "r2n02-ib"]),
    ],
)
def test_host_lists(text: str, hosts: list[str]) -> None:
    assert expand(text) == hosts


@pytest.mark.parametrize("text", ["gpu[1-3", "gpu1]", "gpu[3-1]", "gpu[]", "gpu[a]", "gpu[1-[2]]", "n[0-9999999]"])
def test_damaged_host_lists_are_named(text: str) -> None:
    with pytest.raises(InvalidInputError, match="is not a host list"):
        expand(text)


@given(st.lists(st.integers(0, 400), min_size=1, unique=True).map(sorted), st.integers(1, 4))
def test_what_is_folded_unfolds(numbers: list[int], width: int) -> None:
    folded = ",".join(str(number).zfill(width) for number in numbers)
    assert expand(f"node[{folded}]") == [f"node{str(number).zfill(width)}" for number in numbers]


@pytest.mark.parametrize(
    ("text", "tasks", "limit", "cut"),
    [
        ("1-10%2", list(range(1, 11)), 2, False),
        ("[7-8%1]", [7, 8], 1, False),
        ("3", [3], None, False),
        ("0-15:4,20", [0, 4, 8, 12, 20], None, False),
        ("1-3,5,...", [1, 2, 3, 5], None, True),
        ("1-3,5-...%4", [1, 2, 3], 4, True),
    ],
)
def test_array_tasks(text: str, tasks: list[int], limit: int | None, cut: bool) -> None:
    ranges, found_limit, found_cut = task_ids(text)
    assert [task for part in ranges for task in part] == tasks
    assert (found_limit, found_cut) == (limit, cut)


@pytest.mark.parametrize("text", ["x", "1-2-3", "1:2:3", "0-4:0"])
def test_array_tasks_that_are_none(text: str) -> None:
    with pytest.raises(InvalidInputError, match="is not the tasks of a job array"):
        task_ids(text)


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("", []),
        ("(null)", []),
        ("gpu", [Gres("gpu", "", 1)]),
        ("gpu:8", [Gres("gpu", "", 8)]),
        ("gpu:a100", [Gres("gpu", "a100", 1)]),
        ("gpu:a100:4(S:0-1)", [Gres("gpu", "a100", 4)]),
        ("gpu:a100:3(IDX:0,2-3)", [Gres("gpu", "a100", 3, (0, 2, 3))]),
        ("gpu:h100:0(IDX:N/A)", [Gres("gpu", "h100", 0, ())]),
        ("gpu:(null):2(IDX:0-1)", [Gres("gpu", "", 2, (0, 1))]),
        ("gres:gpu:a100:2", [Gres("gpu", "a100", 2)]),
        ("gres/gpu:4", [Gres("gpu", "", 4)]),
        ("gres/gpu=2", [Gres("gpu", "", 2)]),
        ("gres/gpu:h100=2", [Gres("gpu", "h100", 2)]),
        ("gpu:no_consume:4", [Gres("gpu", "", 4)]),
        ("gpu:a100:2(S:0),gpu:h100:2(S:1),nic:1", [Gres("gpu", "a100", 2), Gres("gpu", "h100", 2), Gres("nic", "", 1)]),
        ("gpu:a100:1(IDX:0,2),shard:a100:2K", [Gres("gpu", "a100", 1, (0, 2)), Gres("shard", "a100", 2048)]),
    ],
)
def test_generic_resources(text: str, items: list[Gres]) -> None:
    assert list(parse_gres(text)) == items


def test_a_mig_type_is_not_a_gpu() -> None:
    items = parse_gres("gpu:a100:3,gpu:a100_1g.5gb:7,gpu:nvidia_h100_80gb_hbm3_2g.20gb:1,gpu:1g.5gb:2,shard:4")
    assert gpus_of(items) == Gpus(3, ("a100",), (("1g.5gb", 9), ("2g.20gb", 1)), ("shard",))


def test_trackable_resources_are_not_counted_twice() -> None:
    tres = parse_tres("cpu=8,mem=1280.50G,node=1,billing=8,gres/gpu=4,gres/gpu:a100=4")
    assert tres["cpu"] == 8
    assert tres["mem"] == round(1280.5 * 2**30)
    assert gpus_of_tres(tres) == Gpus(4, ("a100",))
    assert gpus_of_tres(parse_tres("cpu=2,gres/gpu=4")) == Gpus(4)
    assert gpus_of_tres(parse_tres("gres/gpu:a100=1,gres/gpu:h100=2")) == Gpus(3, ("a100", "h100"))
    # Not tracked is not none.
    assert gpus_of_tres(parse_tres("cpu=2,mem=500M")) is None


def test_memory_without_a_unit_is_mib() -> None:
    assert parse_tres("mem=512")["mem"] == amount("512M") == 512 * 2**20


@pytest.mark.parametrize("text", ["cpu", "cpu=eight", "mem=4X"])
def test_trackable_resources_that_are_none(text: str) -> None:
    with pytest.raises(InvalidInputError):
        parse_tres(text)


@pytest.mark.parametrize("text", ["gpu:a:b:c", "gpu:1(IDX:x)"])
def test_generic_resources_that_are_none(text: str) -> None:
    with pytest.raises(InvalidInputError):
        parse_gres(text)


@given(st.text(alphabet="gpu:a1()IDXS,-=/.% ", max_size=30))
def test_no_text_breaks_the_parsers(text: str) -> None:
    for parse in (parse_gres, parse_tres, task_ids, expand):
        with contextlib.suppress(InvalidInputError):
            parse(text)
