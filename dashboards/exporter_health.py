"""Exporter health: can the other boards be trusted?"""

from __future__ import annotations

from typing import Any

from dashboards import frame
from dashboards.panels import (
    ANY_IS_BAD,
    GREEN,
    NEUTRAL,
    ORANGE,
    RED,
    YELLOW,
    coloured_column,
    column,
    query,
    rows,
    stat,
    table,
    texts,
    timeseries,
)
from dashboards.queries import quantile
from exporters.boards import Board

_SOURCE = 'source=~"$source"'


def board() -> Any:
    """Return the board."""
    return frame.dashboard(
        Board.EXPORTERS,
        "Exporter health",
        "Whether the exporters and the incident server see what they should: read this first when a board looks empty.",
        [
            "Can the boards be trusted?",
            stat(
                "Silent sources",
                "Exporters whose last poll of the scheduler or the GPUs gave nothing.",
                f"count(prioscope_source_up{{{_SOURCE}}} == 0) or 0 * count(prioscope_source_up{{{_SOURCE}}})",
                steps=ANY_IS_BAD,
                no_value="no exporter",
            ),
            stat(
                "Series withheld",
                "Exporters whose snapshot is so old that they withhold its series: the boards show gaps rather than old"
                " figures.",
                f"sum(prioscope_snapshot_stale{{{_SOURCE}}})",
                steps=ANY_IS_BAD,
                no_value="no exporter",
            ),
            stat(
                "Oldest snapshot",
                "Age of the oldest snapshot that is served.",
                f"max(prioscope_snapshot_age_seconds{{{_SOURCE}}})",
                unit="s",
                steps=((None, GREEN), (60, YELLOW), (300, RED)),
            ),
            stat(
                "Parts not read",
                "Things that the sources could not read in their last poll. They are listed below.",
                f"sum(prioscope_source_unread{{{_SOURCE}}}) or 0 * count(prioscope_source_up{{{_SOURCE}}} == 1)",
                steps=((None, GREEN), (1, YELLOW)),
            ),
            stat(
                "Series over the cap",
                "Samples, over the time range, that went to the overflow series or were left out.",
                "sum(increase(prioscope_series_overflow_total[$__range]))"
                f" or 0 * count(prioscope_source_up{{{_SOURCE}}})",
                steps=((None, GREEN), (1, YELLOW)),
                decimals=0,
            ),
            stat(
                "GPUs lost",
                "GPUs that are lost, wedged or unreadable.",
                "count(gpu_up == 0) or 0 * count(gpu_up)",
                steps=ANY_IS_BAD,
                no_value="no GPU known",
            ),
            table(
                "Sources",
                "Each exporter: whether it reads its source, and how old its figures are.",
                [
                    rows(f"max by (source, instance) (prioscope_source_up{{{_SOURCE}}})"),
                    rows(f"max by (source, instance) (prioscope_snapshot_age_seconds{{{_SOURCE}}})"),
                    rows(f"max by (source, instance) (prioscope_snapshot_stale{{{_SOURCE}}})"),
                ],
                {
                    "source": "Source",
                    "instance": "Exporter",
                    "Value #A": "Answers",
                    "Value #B": "Age",
                    "Value #C": "Withheld",
                },
                no_value="no exporter",
                overrides=[
                    column("Answers", mappings=texts({"1": ("yes", GREEN), "0": ("no", RED)})),
                    column("Withheld", mappings=texts({"0": ("no", GREEN), "1": ("yes", RED)})),
                    coloured_column("Age", "s", ((None, GREEN), (60, YELLOW), (300, RED))),
                ],
            ),
            table(
                "Not read, and why",
                "What the sources could not read in their last poll.",
                [
                    rows(
                        f"max by (source, what, why) (prioscope_source_unread{{{_SOURCE}}})",
                    )
                ],
                {"source": "Source", "what": "What", "why": "Why", "Value": "Times"},
                overrides=[
                    column("Source", custom__width=90),
                    column("Times", custom__width=65),
                    column("Why", custom__cellOptions={"type": "auto", "wrapText": True}),
                ],
                no_value="everything was read, or no exporter answers",
            ),
            "Polls and scrapes",
            timeseries(
                "Polls",
                "Polls per minute.",
                [
                    query(
                        f"60 * sum by (source) (rate(prioscope_polls_total{{{_SOURCE}}}[$__rate_interval]))",
                        "{{source}}",
                    )
                ],
                unit="suffix: /min",
                width=8,
            ),
            timeseries(
                "Polls that failed",
                "Failures per minute, by cause.",
                [
                    query(
                        "60 * sum by (source, cause)"
                        f" (rate(prioscope_poll_errors_total{{{_SOURCE}}}[$__rate_interval]))",
                        "{{source}}: {{cause}}",
                    )
                ],
                unit="suffix: /min",
                least_maximum=1,
                width=8,
            ),
            timeseries(
                "Time that a poll takes, 95th percentile",
                "A poll that nears the interval means that the figures are late.",
                [query(quantile(0.95, "prioscope_poll_duration_seconds", _SOURCE, "source"), "{{source}}")],
                unit="s",
                width=8,
            ),
            timeseries(
                "Time that a scrape takes, 95th percentile",
                "How long the exporter takes to write its metrics.",
                [query(quantile(0.95, "prioscope_scrape_duration_seconds"), "all exporters")],
                unit="s",
                width=8,
            ),
            timeseries(
                "Samples over the cap",
                "Samples per minute that went to the overflow series, by family. Nothing is drawn while there are"
                " none.",
                [query("60 * sum by (family) (rate(prioscope_series_overflow_total[$__rate_interval]))", "{{family}}")],
                unit="suffix: /min",
                width=8,
            ),
            table(
                "Versions",
                "Exporters by version; several at once are a rollout, or a forgotten one.",
                [rows("count by (source, version, python) (prioscope_exporter_build_info)")],
                {"source": "Source", "version": "Version", "python": "Python", "Value": "Exporters"},
                width=8,
            ),
            "Incident server",
            stat(
                "Waiting to be explained",
                "Incidents in the queue.",
                "sum(rca_server_queue_length)",
                steps=((None, GREEN), (10, YELLOW), (80, RED)),
                no_value="no server",
            ),
            stat(
                "Failures",
                "Attempts that failed over the time range, in all stages.",
                "sum(increase(rca_server_failures_total[$__range])) or 0 * count(rca_server_build_info)",
                steps=((None, GREEN), (1, ORANGE)),
                decimals=0,
                no_value="no server",
            ),
            stat(
                "Last success",
                "When an incident was last explained.",
                "1000 * max(rca_server_last_success_timestamp_seconds)",
                unit="dateTimeFromNow",
                steps=NEUTRAL,
                no_value="none yet",
            ),
            timeseries(
                "From alert to explanation, 95th percentile",
                "Time from the start of an alert to its stored explanation.",
                [query(quantile(0.95, "rca_server_explanation_delay_seconds"), "all incidents")],
                unit="s",
                rare=True,
                height=8,
                steps=((None, "transparent"), (30, "orange")),
            ),
            table(
                "Stored incidents",
                "By state.",
                [rows("sum by (state) (rca_server_incidents)")],
                {"state": "State", "Value": "Incidents"},
                width=6,
                no_value="no server",
            ),
            table(
                "Alerts received",
                "Over the time range, by what was done with them.",
                [rows("sum by (outcome) (increase(rca_server_alerts_total[$__range]))")],
                {"outcome": "Outcome", "Value": "Alerts"},
                width=6,
                decimals=0,
                no_value="no server",
            ),
            timeseries(
                "Time by stage, 95th percentile",
                "How long capturing, explaining and publishing take.",
                [query(quantile(0.95, "rca_server_stage_duration_seconds", by="stage"), "{{stage}}")],
                unit="s",
                rare=True,
            ),
        ],
        variables=[frame.source()],
    )
