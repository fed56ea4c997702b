"""The API does what its OpenAPI document says, for whatever a client sends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance

from tests.support.serving import ServeProcess, post, serving, webhook, write_bundle

pytestmark = [pytest.mark.services, pytest.mark.slow]

TOKEN = "a-token-of-this-test"  # noqa: S105
#: Every request carries the token here; who has none is test_security's subject. And a document cannot say which cursor
#: or date a server takes.
OTHERWISE = [ignored_auth, positive_data_acceptance]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("api")
    write_bundle(folder / "bundles")
    (folder / "token").write_text(TOKEN)
    with serving(folder, "--bundles", folder / "bundles", "--token-file", folder / "token") as running:
        assert post(running.url, webhook(1), TOKEN)[0] == 202
        yield running


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_every_answer_is_one_that_is_documented(server: ServeProcess, mode: GenerationMode) -> None:
    """Valid requests of every operation, and requests that break the document."""
    authorization = {"Authorization": f"Bearer {TOKEN}"}
    schema = schemathesis.openapi.from_url(f"{server.url}/api/v1/openapi.json", headers=authorization)
    operations = [found.ok() for found in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/api/v1/alerts", "/api/v1/incidents"}
    for operation in operations:

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
        def answers_as_documented(case: schemathesis.Case) -> None:
            # Not `case.call()`: it looks into urllib3, which grafana-client's HTTP library replaces.
            response = requests.request(timeout=10, **case.as_transport_kwargs(headers=authorization))
            # A full queue is answered with 503 by intent; nothing else above 499 is.
            if response.status_code != 503:
                assert response.status_code < 500, response.text
            case.validate_response(response, excluded_checks=OTHERWISE)

        answers_as_documented()
