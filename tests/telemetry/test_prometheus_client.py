"""How the capture asks a Prometheus-compatible API: limits, retries, and every way not to get an answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rca.errors import InvalidInputError, NotFoundError
from rca.telemetry.prometheus import CaptureConfig
from rca.telemetry.prometheus.answers import Answer, Failure, QueryError
from rca.telemetry.prometheus.ask import label_matcher, quoted
from rca.telemetry.prometheus.client import MOST_POINTS, Client, chunks
from tests.support.answering import Answering, Reply, Request, answering
from tests.support.services import free_port


def matrix(*points: tuple[float, str], **more: object) -> Reply:
    data = {"resultType": "matrix", "result": [{"metric": {"node": "a"}, "values": list(points)}] if points else []}
    return Reply({"status": "success", "data": data, **more})


def ask(config: CaptureConfig, *, start: float = 0.0, end: float = 60.0, step: float = 15.0) -> Answer:
    async def run() -> Answer:
        deadline = asyncio.get_running_loop().time() + config.total_timeout_seconds
        async with Client(config, deadline) as client:
            return await client.range("up", start, end, step)

    return asyncio.run(run())


def failure(config: CaptureConfig, **times: float) -> QueryError:
    with pytest.raises(QueryError) as error:
        ask(config, **times)
    return error.value


def asked(reply: Callable[[Request], Reply], **settings: object) -> tuple[QueryError, Answering]:
    with answering(reply) as server:
        return failure(replace(CaptureConfig(server.url), **settings)), server  # type: ignore[arg-type]


def test_an_answer_is_series_of_numbers_with_the_servers_notes() -> None:
    with answering(
        lambda _: matrix((0, "1"), (15, "NaN"), (30, "+Inf"), infos=["metric might not be a counter"])
    ) as server:
        found = ask(CaptureConfig(server.url))
    np.testing.assert_array_equal(found.series[0].values, [1.0, np.nan, np.inf])
    assert found.series[0].labels == {"node": "a"}
    assert found.notes == ("metric might not be a counter",)
    assert not found.partial
    (request,) = server.requests
    assert (request.method, request.path, request.form["query"]) == ("POST", "/api/v1/query_range", "up")


@pytest.mark.parametrize(
    "more",
    [
        {"isPartial": True},
        {"warnings": ['fetch series for {ext_replica="b"} Addr: store-2:10901: rpc error: unavailable']},
        {"warnings": ["partial response: store gateway timed out"]},
    ],
    ids=["VictoriaMetrics", "Thanos store", "Thanos"],
)
def test_a_partial_answer_is_told_as_such(more: dict[str, object]) -> None:
    with answering(lambda _: matrix((0, "1"), **more)) as server:
        assert ask(CaptureConfig(server.url)).partial


def test_a_long_range_is_asked_in_parts_and_put_together() -> None:
    def reply(request: Request) -> Reply:
        start, end = float(request.form["start"]), float(request.form["end"])
        points = int((end - start) / 15) + 1
        if points > MOST_POINTS:
            return Reply({"status": "error", "errorType": "bad_data", "error": "exceeded maximum resolution"}, 400)
        return matrix((start, "1"), (end, "2"))

    with answering(reply) as server:
        found = ask(CaptureConfig(server.url), end=3.5 * MOST_POINTS * 15)
    assert len(server.requests) == 4
    assert len(found.series) == 1
    assert np.all(np.diff(found.series[0].times) > 0)


def test_chunks_cover_every_step_once() -> None:
    parts = chunks(100.0, 1000.0, 10.0, most=7)
    grid = [start + 10.0 * i for start, end in parts for i in range(round((end - start) / 10.0) + 1)]
    assert grid == [100.0 + 10.0 * i for i in range(91)]


def test_what_is_away_for_a_moment_is_asked_again() -> None:
    answers = iter([Reply({"status": "error", "error": "loading"}, 503), matrix((0, "1"))])
    with answering(lambda _: next(answers)) as server:
        assert ask(CaptureConfig(server.url)).series
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("reply", "kind", "requests"),
    [
        (Reply({"status": "error", "errorType": "bad_data", "error": "parse error"}, 400), Failure.QUERY, 1),
        (Reply({"status": "error", "errorType": "timeout", "error": "query timed out"}, 503), Failure.TIMEOUT, 1),
        (Reply(b"<html>Bad gateway</html>", 502), Failure.UNREACHABLE, 2),
        (Reply(b"no token", 401), Failure.REFUSED, 1),
        (Reply(b"", 302, {"Location": "http://elsewhere.example/login"}), Failure.REFUSED, 1),
        (Reply({"status": "success", "data": {"resultType": "scalar", "result": []}}), Failure.INVALID, 1),
        (Reply(b"[" * 100_000), Failure.UNREACHABLE, 2),
    ],
    ids=["query", "server's time-out", "gateway", "credentials", "redirect", "type", "nested"],
)  # fmt: skip
def test_each_failure_has_its_kind_and_is_repeated_only_where_that_helps(
    reply: Reply, kind: Failure, requests: int
) -> None:
    error, server = asked(lambda _: reply)
    assert error.kind is kind
    assert len(server.requests) == requests


def test_nobody_there() -> None:
    assert failure(CaptureConfig(f"http://127.0.0.1:{free_port()}")).kind is Failure.UNREACHABLE


def test_a_slow_answer_ends_at_the_time_out_however_slowly_it_drips() -> None:
    def slow(_: Request) -> Reply:
        time.sleep(3)
        return matrix((0, "1"))

    begin = time.monotonic()
    error, _ = asked(slow, query_timeout_seconds=0.3, settle_seconds=0.0)
    assert error.kind is Failure.TIMEOUT
    assert time.monotonic() - begin < 2.5


def test_the_budget_ends_a_capture() -> None:
    with answering(lambda _: matrix((0, "1"))) as server:
        error = failure(CaptureConfig(server.url, query_budget=2), end=3.5 * MOST_POINTS * 15)
    assert error.kind is Failure.BUDGET
    assert len(server.requests) == 2


def test_secrets_are_sent_and_never_shown(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cr3t\n")
    with answering(lambda _: Reply(b"s3cr3t is wrong", 403)) as server:
        config = CaptureConfig(server.url, bearer_token_file=tmp_path / "token", headers={"X-Scope-OrgID": "tenant-7"})
        error = failure(config)
    (request,) = server.requests
    assert request.headers["Authorization"] == "Bearer s3cr3t"
    assert request.headers["X-Scope-OrgID"] == "tenant-7"
    assert "s3cr3t" not in f"{error} {config!r}"
    assert "tenant-7" not in repr(config)


def test_a_missing_token_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="token"):
        ask(CaptureConfig("http://127.0.0.1:1", bearer_token_file=tmp_path / "token"))


@pytest.mark.parametrize(
    "settings",
    [
        {"prometheus_url": "prometheus:9090"},
        {"prometheus_url": "http://user:password@prometheus:9090"},
        {"prometheus_url": "http://prometheus:9090?x=1"},
        {"step_seconds": 0.0},
        {"query_budget": 0},
        {"total_timeout_seconds": float("nan")},
        {"settle_seconds": 100.0},
        {"username": "me"},
        {"tls_cert": Path("c.pem")},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_wrong_settings_are_refused_and_no_password_is_repeated(settings: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError) as error:
        CaptureConfig(**{"prometheus_url": "http://prometheus:9090", **settings})  # type: ignore[arg-type]
    assert "password@" not in str(error.value)
    assert error.value.cure


def test_label_values_cannot_end_their_string() -> None:
    assert quoted('a"} or vector(1) #\n\\') == '"a\\"} or vector(1) #\\n\\\\"'
    assert label_matcher("pod", ["a.b", "c|d"]) == 'pod=~"a\\\\.b|c\\\\|d"'
    assert label_matcher("pod", []) == ""
