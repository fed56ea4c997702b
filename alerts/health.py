"""Alerts on the toolkit itself: exporters and `rca serve` absent, stale, overflowing, failing; and the incidents' risk.

An absence is only an alert where something was there before: a target that Prometheus knows, or series of an hour ago.
"""

from __future__ import annotations

from typing import Final

from alerts.model import JOBS, SERVE_JOB, Alert, Group, Scope, Severity, grown, matching, other_than
from exporters.boards import Board

_AT: Final = ("job", "instance")
_BY: Final = ", ".join(_AT)
_SOURCE: Final = (*_AT, "source")
_BY_SOURCE: Final = ", ".join(_SOURCE)
_VARIABLES: Final = {"source": "source"}
_EXPORTER: Final = "The {{ $labels.source }} exporter at {{ $labels.instance }}"
_SERVER: Final = "`rca serve` at {{ $labels.instance }}"


def exporters(scope: Scope) -> Group:
    """Return the alerts on the exporters."""
    up = scope("up", matching("job", JOBS))
    others = scope("up", matching("job", JOBS), other_than("job", SERVE_JOB))
    source_up = scope("prioscope_source_up")
    scheduler_up = scope("prioscope_source_up", other_than("source", "gpu"))
    unread = scope("prioscope_source_unread", other_than("what", "snapshot"))
    # A gpu exporter on a machine that never had a GPU has nothing to complain about.
    had_gpu = f"on ({_BY}) count by ({_BY}) (last_over_time({scope('gpu_up', window='1d')}))"
    errors, polls = scope("prioscope_poll_errors_total", window="15m"), scope("prioscope_polls_total", window="15m")
    overflow = grown(scope, "prioscope_series_overflow_total", "15m", "prioscope_exporter_build_info")
    return Group(
        "prioscope-exporters",
        (
            Alert(
                "PrioscopeExporterDown",
                f"max by ({_BY}) ({others}) == 0",
                Severity.WARNING,
                _AT,
                "An exporter does not answer Prometheus",
                "{{ $labels.instance }} ({{ $labels.job }}) does not answer.",
                Board.EXPORTERS,
                {},
                "M9",
                hold="5m",
            ),
            Alert(
                "PrioscopeTargetGone",
                f"count by (job) ({up} offset 1h) unless on (job) count by (job) ({up})",
                Severity.WARNING,
                ("job",),
                "Every target of a job has disappeared",
                "Job {{ $labels.job }} had {{ $value }} targets an hour ago, and has none now.",
                Board.EXPORTERS,
                {},
                "M9",
                hold="15m",
            ),
            Alert(
                "PrioscopeSourceDown",
                f"max by ({_BY_SOURCE}) ({scheduler_up}) == 0"
                f" or max by ({_BY_SOURCE}) ({scope('prioscope_source_up', source='gpu')}) == 0 and {had_gpu}",
                Severity.WARNING,
                _SOURCE,
                "An exporter cannot read what it observes",
                f"{_EXPORTER} cannot read its source; prioscope_source_unread says why.",
                Board.EXPORTERS,
                _VARIABLES,
                "M9",
                hold="5m",
            ),
            Alert(
                "PrioscopeSnapshotStale",
                f"max by ({_BY_SOURCE}) ({scope('prioscope_snapshot_stale')}) == 1",
                Severity.WARNING,
                _SOURCE,
                "An exporter withholds its series because they are too old",
                f"{_EXPORTER} has no fresh snapshot: its series, and the alerts on them, are gone.",
                Board.EXPORTERS,
                _VARIABLES,
                "M9",
                hold="1m",
            ),
            Alert(
                "PrioscopeClusterDataAbsent",
                f"count by (cluster, {_BY}) ({scope('priority_workloads')} offset 1h)"
                f" unless on (cluster) {scope('priority_workloads')}"
                f" unless on ({_BY}) {source_up} == 1",
                Severity.WARNING,
                ("cluster", *_AT),
                "Nothing is known any more about a cluster",
                "There were workloads of {{ $labels.cluster }} an hour ago, and there is nothing now.",
                Board.FLEET,
                {"cluster": "cluster"},
                "M9",
                hold="10m",
            ),
            Alert(
                "PrioscopeSourceIncomplete",
                f"sum by ({_BY_SOURCE}, what) ({unread}) > 0 and on ({_BY}) {source_up} == 1",
                Severity.INFO,
                (*_SOURCE, "what"),
                "An exporter cannot read a part of what it observes",
                f"{_EXPORTER} cannot read {{{{ $labels.what }}}}: checks that need it are not made.",
                Board.EXPORTERS,
                _VARIABLES,
                "M9",
                hold="30m",
            ),
            Alert(
                "PrioscopePollErrors",
                f"sum by ({_BY_SOURCE}) (increase({errors})) / sum by ({_BY_SOURCE}) (increase({polls})) > 0.2"
                f" and on ({_BY}) {source_up} == 1",
                Severity.INFO,
                _SOURCE,
                "A source fails now and then",
                f"{{{{ $value | humanizePercentage }}}} of the polls in 15 minutes failed. {_EXPORTER} works between.",
                Board.EXPORTERS,
                _VARIABLES,
                "M9",
                hold="10m",
            ),
            Alert(
                "PrioscopeSeriesOverflow",
                f"sum by ({_BY}, family) ({overflow}) > 0",
                Severity.INFO,
                (*_AT, "family"),
                "A metric has more label sets than its cap",
                "{{ $labels.family }} of {{ $labels.instance }} passed its cap by {{ $value | humanize }} samples in 15"
                " minutes: they were summed or left out.",
                Board.EXPORTERS,
                {},
                "M9",
                hold="5m",
            ),
        ),
    )


def server(scope: Scope) -> Group:
    """Return the alerts on `rca serve` and on the risk of its incidents. None of them is captured, or they"
    " would loop."""
    length, capacity = scope("rca_server_queue_length"), scope("rca_server_queue_capacity")
    success = scope("rca_server_last_success_timestamp_seconds")
    delay = scope("rca_server_explanation_delay_seconds_bucket", window="1h")
    refused = grown(scope, "rca_server_alerts_total", "15m", "rca_server_build_info", outcome="refused")
    failures = grown(scope, "rca_server_failures_total", "15m", "rca_server_build_info")
    risk = f"max by (incident, band) ({scope('rca_incident_risk_ratio')})"
    about = f"max by (incident, cluster, victim, cause) ({scope('rca_incident_info')})"
    begun = f"max by (incident) ({scope('rca_incident_start_timestamp_seconds')})"
    recent = f"on (incident) time() - {begun} < 3600"
    named = f"* on (incident) group_left (cluster, victim, cause) {about}"
    incident = ("incident", "band", "cluster", "victim", "cause")
    return Group(
        "prioscope-server",
        (
            Alert(
                "PrioscopeServerDown",
                f"max by ({_BY}) ({scope('up', job=SERVE_JOB)}) == 0",
                Severity.WARNING,
                _AT,
                "The incident server does not answer Prometheus",
                f"{_SERVER} does not answer; Alertmanager repeats what it sends.",
                Board.EXPORTERS,
                {},
                "P10",
                hold="5m",
            ),
            Alert(
                "PrioscopeServerQueueFilling",
                f"max by ({_BY}) ({length}) / max by ({_BY}) ({capacity}) > 0.8",
                Severity.WARNING,
                _AT,
                "The incident server's queue is nearly full",
                f"The queue of {_SERVER} is {{{{ $value | humanizePercentage }}}} full; past its capacity it"
                " refuses alerts.",
                Board.EXPORTERS,
                {},
                "P10",
                hold="5m",
            ),
            Alert(
                "PrioscopeServerRefusing",
                f"sum by ({_BY}) ({refused}) > 0",
                Severity.WARNING,
                _AT,
                "The incident server refuses alerts",
                f"{_SERVER} refused {{{{ $value | humanize }}}} alerts in 15 minutes.",
                Board.EXPORTERS,
                {},
                "P10",
                hold="5m",
            ),
            Alert(
                "PrioscopeServerFailing",
                f"sum by ({_BY}, stage) ({failures}) >= 3",
                Severity.WARNING,
                (*_AT, "stage"),
                "The incident server fails again and again",
                f"{_SERVER} failed to {{{{ $labels.stage }}}} {{{{ $value | humanize }}}} times in 15 minutes.",
                Board.EXPORTERS,
                {},
                "P10",
                hold="5m",
            ),
            Alert(
                "PrioscopeServerStalled",
                f"max by ({_BY}) ({length}) > 0 unless on ({_BY}) time() - max by ({_BY}) ({success}) < 900",
                Severity.WARNING,
                _AT,
                "Incidents wait, and none has been explained for a while",
                f"{{{{ $value }}}} incidents wait at {_SERVER}, and none was explained in the last 15 minutes.",
                Board.EXPORTERS,
                {},
                "P10",
                hold="15m",
            ),
            Alert(
                "PrioscopeServerSlow",
                f"histogram_quantile(0.9, sum by ({_BY}, le) (rate({delay}))) > 300",
                Severity.INFO,
                _AT,
                "Explanations come late",
                f"One in ten explanations of {_SERVER} comes {{{{ $value | humanizeDuration }}}} after its alert,"
                " or later.",
                Board.EXPORTERS,
                {},
                "M9",
                hold="15m",
            ),
            Alert(
                "PrioscopeIncidentRiskBreak",
                f"({risk} >= 0.7) {named} and {recent}",
                Severity.CRITICAL,
                incident,
                "An incident has a risk score in the band that calls for stopping the cause",
                "Incident {{ $labels.incident }} ({{ $labels.victim }}, {{ $labels.cluster }}) has a risk of"
                ' {{ $value | printf "%.2f" }}; cause: {{ if $labels.cause }}{{ $labels.cause }}{{ else }}none'
                " found{{ end }}.",
                Board.INCIDENT,
                {"incident": "incident"},
                "M6",
            ),
            Alert(
                "PrioscopeIncidentRiskScale",
                f"({risk} >= 0.3 < 0.7) {named} and {recent}",
                Severity.INFO,
                incident,
                "An incident has a risk score in the band that calls for more capacity",
                "Incident {{ $labels.incident }} ({{ $labels.victim }}, {{ $labels.cluster }}) has a risk of"
                ' {{ $value | printf "%.2f" }}; cause: {{ if $labels.cause }}{{ $labels.cause }}{{ else }}none'
                " found{{ end }}.",
                Board.INCIDENT,
                {"incident": "incident"},
                "M6",
            ),
        ),
    )
