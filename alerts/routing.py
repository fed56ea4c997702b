"""Alertmanager: who hears of what, what is captured, and what silences what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from alerts.build import HEADER, dump
from alerts.model import quote
from alerts.slo import BURNS
from exporters.errors import InvalidInputError

CAPTURE: Final = "rca-serve"
#: Receivers by severity. They have no integration: which pager, chat or ticket system there is, only the user knows.
RECEIVERS: Final = {"critical": "page", "warning": "ticket", "info": "notice"}
DEFAULT: Final = "notice"

SERVE_URL: Final = "http://localhost:9945"
TOKEN_FILE: Final = "/etc/alertmanager/rca-token"  # noqa: S105 - where it is, not what

_VIOLATIONS: Final = (
    "PrioscopeUrgentPriorityInversion",
    "PrioscopePriorityInversion",
    "PrioscopeFragmentationBlocked",
    "PrioscopePreemptionFailed",
)
_ON_A_GPU: Final = (
    "PrioscopeGpuMissing",
    "PrioscopeGpuHardwareXid",
    "PrioscopeGpuProgramXid",
    "PrioscopeGpuUncorrectedEcc",
    "PrioscopeGpuCorrectedEccHigh",
    "PrioscopeGpuThrottled",
    "PrioscopeGpuMemoryFragmented",
    "PrioscopeGpuMemoryExhausted",
)
_ABSENCES: Final = (
    "PrioscopeClusterDataAbsent",
    "PrioscopeGpuMissing",
    "PrioscopeSourceDown",
    "PrioscopeSourceIncomplete",
    "PrioscopePollErrors",
)


@dataclass(frozen=True, slots=True)
class Inhibition:
    """While one of ``sources`` fires, ``targets`` with the same values of ``equal`` are silent, because of ``why``."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    equal: tuple[str, ...]
    why: str


def inhibitions() -> tuple[Inhibition, ...]:
    """Return what silences what."""
    burns = [burn.name for burn in BURNS]
    return (
        *(
            Inhibition((name,), tuple(burns[index + 1 :]), ("cluster", "priority_level"), "a faster burn says it all")
            for index, name in enumerate(burns[:-1])
        ),
        Inhibition(
            _VIOLATIONS,
            ("PrioscopeSchedulingDelay", "PrioscopeWaitAboveAdaptiveThreshold"),
            ("cluster", "service", "priority_level"),
            "the wait has a known reason",
        ),
        Inhibition(
            ("PrioscopeSchedulingDelay",),
            ("PrioscopeWaitAboveAdaptiveThreshold",),
            ("cluster", "service", "priority_level"),
            "a broken promise tells more than an unusual wait",
        ),
        Inhibition(("PrioscopeGpuLost",), _ON_A_GPU, ("node", "gpu", "uuid"), "it follows from the lost GPU"),
        Inhibition(
            ("PrioscopeGpuNodeDown",),
            ("PrioscopeGpuLost", *_ON_A_GPU),
            ("node",),
            "it follows from the machine being down",
        ),
        Inhibition(
            ("PrioscopeGpuMemoryExhausted",),
            ("PrioscopeGpuHostCpuSaturated", "PrioscopeGpuHostNetworkJitter"),
            ("node",),
            "order of V15: GPU memory before CPU and network",
        ),
        Inhibition(
            ("PrioscopeGpuHostCpuSaturated",),
            ("PrioscopeGpuHostNetworkJitter",),
            ("node",),
            "order of V15: CPU before network",
        ),
        Inhibition(
            ("PrioscopeExporterDown",),
            ("PrioscopeSnapshotStale", *_ABSENCES),
            ("job", "instance"),
            "nothing can be known of what a silent exporter observes",
        ),
        Inhibition(
            ("PrioscopeSnapshotStale",),
            _ABSENCES,
            ("job", "instance"),
            "its series are withheld, which is said already",
        ),
        Inhibition(
            ("PrioscopeTargetGone",),
            ("PrioscopeClusterDataAbsent", "PrioscopeGpuMissing"),
            ("job",),
            "its exporters are gone",
        ),
        Inhibition(
            ("PrioscopeServerDown",),
            (
                "PrioscopeServerQueueFilling",
                "PrioscopeServerRefusing",
                "PrioscopeServerFailing",
                "PrioscopeServerStalled",
                "PrioscopeServerSlow",
            ),
            ("job", "instance"),
            "it follows from the server being down",
        ),
        Inhibition(
            ("PrioscopeServerStalled",),
            ("PrioscopeServerQueueFilling",),
            ("job", "instance"),
            "the queue fills because nothing is explained",
        ),
    )


def configuration(serve_url: str = SERVE_URL, token_file: str = TOKEN_FILE) -> dict[str, Any]:
    """Return the Alertmanager configuration.

    Raises:
        InvalidInputError: ``serve_url`` is not an HTTP URL.
    """
    parts = urlsplit(serve_url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise InvalidInputError(
            f"the address of `rca serve` {serve_url!r} is not an HTTP URL", cure="write it like http://rca-serve:9945"
        )
    return {
        "route": {
            "receiver": DEFAULT,
            "group_by": ["alertname", "cluster", "service"],
            "group_wait": "30s",
            "group_interval": "5m",
            "repeat_interval": "4h",
            "routes": [
                {
                    # Captured at once, whoever else hears of it: what explains an incident is freshest now.
                    "receiver": CAPTURE,
                    "matchers": ['rca="capture"'],
                    "group_wait": "1s",
                    "group_interval": "30s",
                    "repeat_interval": "1h",
                    "continue": True,
                },
                *(
                    {"receiver": receiver, "matchers": ['alertname=~"Prioscope.+"', f'severity="{severity}"']}
                    for severity, receiver in RECEIVERS.items()
                ),
            ],
        },
        "inhibit_rules": [_inhibit(item) for item in inhibitions()],
        "receivers": [
            {
                "name": CAPTURE,
                "webhook_configs": [
                    {
                        "url": f"{serve_url.rstrip('/')}/api/v1/alerts",
                        "send_resolved": True,
                        "http_config": {"authorization": {"type": "Bearer", "credentials_file": token_file}},
                    }
                ],
            },
            *({"name": name} for name in RECEIVERS.values()),
        ],
    }


def _inhibit(item: Inhibition) -> dict[str, Any]:
    return {
        "source_matchers": [_any(item.sources)],
        "target_matchers": [_any(item.targets)],
        "equal": list(item.equal),
    }


def _any(names: Sequence[str]) -> str:
    return f"alertname{'=~' if len(names) > 1 else '='}{quote('|'.join(names))}"


def text(serve_url: str = SERVE_URL, token_file: str = TOKEN_FILE) -> str:
    """Return the content of ``alertmanager.yml``. Raises as `configuration`."""
    return (
        HEADER
        + "# The receivers page, ticket and notice have no integration yet: add yours (pagerduty_configs,"
        + " email_configs, …).\n"
        + dump(configuration(serve_url, token_file))
    )
