"""The OpenAPI document: the types are described by msgspec, the paths here."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import msgspec

from exporters.poller import version
from rca.explanation import Explanation
from rca.serve.views import AlertsAnswer, Incident, IncidentDetail, Incidents, Problem
from rca.serve.webhook import Webhook
from rca.store.database import SORTS
from rca.store.records import State

MAX_LIMIT: Final = 200
_TYPES: Final = (AlertsAnswer, Explanation, Incident, IncidentDetail, Incidents, Problem, Webhook)


@cache
def document() -> bytes:
    """Return the document as JSON."""
    _, components = msgspec.json.schema_components(_TYPES, ref_template="#/components/schemas/{name}")
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Prioscope incident server",
                "version": version(),
                "description": "Takes Alertmanager's webhook; lists, explains and hands out incidents.",
                "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            },
            "servers": [{"url": "/"}],
            "security": [{"token": []}, {"basic": []}],
            "paths": _paths(),
            "components": {
                "schemas": components,
                "securitySchemes": {
                    "token": {"type": "http", "scheme": "bearer"},
                    "basic": {"type": "http", "scheme": "basic"},
                },
            },
        }
    )


def _paths() -> dict[str, Any]:
    one = "/api/v1/incidents/{id}"
    return {
        "/api/v1/alerts": {
            "post": {
                "operationId": "receiveAlerts",
                "summary": "Alertmanager's webhook, version 4. Answered with 202 once the alerts are on disk.",
                "requestBody": {"required": True, "content": _json("Webhook")},
                "responses": _responses(
                    {"202": _answer("Stored", _json("AlertsAnswer"))}, "400", "408", "413", "415", "503"
                ),
            }
        },
        "/api/v1/incidents": {
            "get": {
                "operationId": "listIncidents",
                "summary": "Lists incidents, newest first.",
                "parameters": [
                    _query("limit", {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": 50}),
                    _query("cursor", {"type": "string"}, "`next` of the page before"),
                    _query("state", {"type": "array", "items": {"type": "string", "enum": [*State]}}),
                    _query("alertname", {"type": "string"}),
                    _query("victim", {"type": "string"}),
                    _query("cause", {"type": "string"}),
                    _query("since", {"type": "string", "format": "date-time"}, "Began at or after"),
                    _query("until", {"type": "string", "format": "date-time"}, "Began before"),
                    _query("sort", {"type": "string", "enum": [*SORTS], "default": "start"}),
                    _query("order", {"type": "string", "enum": ["asc", "desc"], "default": "desc"}),
                ],
                "responses": _responses({"200": _answer("A page", _json("Incidents"))}, "400", "503"),
            }
        },
        one: {
            "get": {
                "operationId": "getIncident",
                "summary": "One incident.",
                "parameters": [_ID],
                "responses": _responses({"200": _answer("The incident", _json("IncidentDetail"))}, "404", "503"),
            }
        },
        f"{one}/explanation": {
            "get": {
                "operationId": "getExplanation",
                "summary": "An explanation, the newest by default.",
                "parameters": [_ID, _query("revision", {"type": "integer", "minimum": 1, "maximum": 2**31 - 1})],
                "responses": _responses({"200": _answer("The explanation", _json("Explanation"))}, "400", "404", "503"),
            }
        },
        f"{one}/bundle": {
            "get": {
                "operationId": "getBundle",
                "summary": "The bundle, for `rca explain`.",
                "parameters": [_ID],
                "responses": _responses(
                    {"200": _answer("A zip file", {"application/zip": {"schema": {"type": "string"}}})}, "404", "503"
                ),
            }
        },
        f"{one}/explain": {
            "post": {
                "operationId": "explainAgain",
                "summary": "Asks for another explanation; the ones before stay.",
                "parameters": [
                    _ID,
                    _query("recapture", {"type": "boolean", "default": False}, "Capture it again first"),
                ],
                "responses": _responses(
                    {"202": _answer("Will be done", _json("Incident"))}, "400", "403", "404", "409", "503"
                ),
            }
        },
    }


_ID: Final = {
    "name": "id",
    "in": "path",
    "required": True,
    "description": "Id, the beginning of one, fingerprint, or `latest`",
    "schema": {"type": "string", "minLength": 1},
}

_PROBLEMS: Final = {
    "400": "The request makes no sense",
    "401": "Who are you?",
    "403": "Not from there",
    "404": "There is none",
    "408": "The request took too long to arrive",
    "409": "Not now, or changed by somebody else",
    "413": "Too large",
    "415": "Not JSON",
    "429": "Too often",
    "503": "The queue is full or the store is away; ask again after `Retry-After`",
}


def _responses(own: dict[str, Any], *problems: str) -> dict[str, Any]:
    content = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return own | {status: _answer(_PROBLEMS[status], content) for status in ("401", *problems, "429")}


def _answer(description: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": content}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _query(name: str, schema: dict[str, Any], description: str = "") -> dict[str, Any]:
    found = {"name": name, "in": "query", "schema": schema}
    return found | ({"description": description} if description else {})
