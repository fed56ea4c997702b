"""Every report format, on an explained and on an inconclusive incident, and on one with hostile names."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import msgspec
import pytest

from rca.explanation import Explanation, GraphEdge, GraphNode, from_json
from rca.report import Format, drawing, render
from rca.report.html import tie
from rca.report.markdown import code, escape
from rca.report.phrases import SECTIONS

# --- every format -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["text", "markdown", "html"])
def test_the_sections_stand_in_reading_order(explained: Explanation, inconclusive: Explanation, format: str) -> None:
    for explanation in (explained, inconclusive):
        report = render(explanation, format)
        heading = {"text": "\n{}\n", "markdown": "\n## {}\n", "html": "<h2>{}</h2>"}[format]
        places = [report.index(heading.format(title)) for title in SECTIONS]
        assert places == sorted(places)


@pytest.mark.parametrize("format", ["text", "markdown", "html"])
@pytest.mark.parametrize(
    "fact",
    [
        "Checkout answers slowly",
        "87 %",
        "420 ms",
        "3.2 s",
        "×7.6",
        "2026-01-31 03:05:00 UTC",
        "GPU contention (91 %)",
        "35 s before the symptom",
        "82 %",  # whole path
        "81 to 90 %",  # interval of the first attribution
        "79 %",  # Shapley share
        "outside the range seen in the baseline",
        "1.21 k/s",
        "no queue metrics in the bundle",
        "scontrol requeue 812",
        "None of the observed nodes: 4 %",
        "prometheus, ok, 1 query",
        "0123456789ab",  # head of the chain
    ],
)
def test_a_report_states_the_facts(explained: Explanation, format: str, fact: str) -> None:
    report = render(explained, format).replace("\u00a0", " ")
    assert fact in report.replace("\\", "")


@pytest.mark.parametrize("format", ["text", "markdown", "html"])
def test_what_is_missing_is_said_and_never_zero(inconclusive: Explanation, format: str) -> None:
    report = render(inconclusive, format).replace("\u00a0", " ")
    assert "Inconclusive: no cause can be named with enough confidence" in report
    assert "baseline not measured" in report
    assert "onset not known" in report
    assert "No path from a cause to the victim could be established." in report
    assert "No counterfactual could be computed" in report
    assert "Nothing could be ruled out." in report
    assert "21 %" in report


@pytest.mark.parametrize("format", list(Format))
def test_reports_are_reproducible_and_end_in_a_newline(explained: Explanation, format: Format) -> None:
    assert render(explained, format) == render(explained, format)
    assert render(explained, format).endswith("\n")


def test_an_unknown_format_is_refused(explained: Explanation) -> None:
    with pytest.raises(ValueError, match="pdf"):
        render(explained, "pdf")


def test_json_is_the_explanation(explained: Explanation) -> None:
    assert from_json(render(explained, "json")) == explained


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_text_fits_the_terminal(explained: Explanation, inconclusive: Explanation, width: int) -> None:
    for explanation in (explained, inconclusive):
        for line in render(explanation, "text", width=width).splitlines():
            assert len(line) <= width, line


@pytest.mark.parametrize("width", [50, 100])
def test_narrow_text_loses_no_figure(explained: Explanation, width: int) -> None:
    report = re.sub(r"\s+", " ", render(explained, "text", width=width))
    for fact in ("2.61 s", "9 to 29 %", "16 %", "2.52 s", "−10 s" if width == 100 else "10 s before the symptom"):
        assert fact in report


def test_colour_only_when_asked(explained: Explanation) -> None:
    assert "\x1b" not in render(explained, "text")
    assert "\x1b[" in render(explained, "text", colour=True)


def test_a_hostile_name_cannot_drive_the_terminal(hostile: Explanation) -> None:
    report = render(hostile, "text", width=100)
    assert "\x1b" not in report
    assert "\u202e" not in report
    assert "\\x1b[31m" in re.sub(r"\s", "", report)


def test_rich_markup_in_a_name_is_text(explained: Explanation) -> None:
    named = msgspec.structs.replace(explained, title="[bold red]gone[/] :boom:")
    assert "[bold red]gone[/] :boom:" in render(named, "text")


# --- Markdown ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a*b_c", r"a\*b\_c"),
        ("<b>&amp;", r"\<b\>\&amp;"),
        ("[x](y)", r"\[x\](y)"),
        ("# not a heading", r"\# not a heading"),
        ("- not a list", r"\- not a list"),
        ("1. not a list", r"1\. not a list"),
        ("a|b", r"a\|b"),
        ("two\nlines", r"two\\nlines"),
        ("@oncall", "@\u2060oncall"),
        ("root@host", "root@host"),
    ],
)
def test_markdown_prose_is_literal(text: str, shown: str) -> None:
    assert escape(text) == shown


@pytest.mark.parametrize(
    ("text", "span"),
    [("plain", "`plain`"), ("a`b", "``a`b``"), ("`a``", "``` `a`` ```"), ("", "*(empty name)*")],
)
def test_code_spans_hold_any_name(text: str, span: str) -> None:
    assert code(text) == span


def test_markdown_tables_keep_their_columns_whatever_the_names(hostile: Explanation) -> None:
    lines = render(hostile, "markdown").splitlines()
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if line.startswith("| ")]
    assert {len(row) for row in rows} == {5, 8}
    assert len(rows) == (2 + 4) + (2 + 5)


def test_markdown_has_no_live_html(hostile: Explanation) -> None:
    # Outside code spans every angle bracket is escaped.
    prose = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", render(hostile, "markdown"))
    assert not re.search(r"(?<!\\)<", prose)


# --- HTML -------------------------------------------------------------------------------------------------------------


class _Page(HTMLParser):
    """Collects the elements, attributes and text of a page, and checks that tags are balanced."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "hr"})

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize("which", ["explained", "inconclusive", "hostile"])
def test_html_is_self_contained(which: str, request: pytest.FixtureRequest) -> None:
    html = render(request.getfixturevalue(which), "html")
    page = _Page(html)
    assert {tag for tag, _ in page.tags} & {
        "script",
        "img",
        "link",
        "iframe",
        "object",
        "embed",
        "base",
        "form",
    } == set()
    for _, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), name
            if name in {"src", "href", "xlink:href", "data", "action"}:
                assert (value or "").startswith("#"), value
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a)
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "script" not in policy


def test_hostile_names_stay_text_everywhere(hostile: Explanation) -> None:
    page = _Page(render(hostile, "html"))
    shown = "".join(page.text)
    assert "<script>alert(1)</script>" in shown
    labels = [a["aria-label"] for _, a in page.tags if "aria-label" in a]
    assert any("<script>" in (label or "") for label in labels), "SVG labels carry names too"


def test_html_follows_the_colour_scheme_and_the_screen(explained: Explanation) -> None:
    html = render(explained, "html")
    assert "prefers-color-scheme: dark" in html
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in html


def test_the_path_is_drawn_from_the_cause_to_the_victim(explained: Explanation) -> None:
    html = render(explained, "html")
    assert html.count('marker-end="url(#head)"') == 4
    # The four hops and the legend's sample.
    assert len(re.findall(r'class="edge (?:\w+ )?path"', html)) == 5


def test_a_number_stays_with_its_unit() -> None:
    assert tie("rose from 420 ms to 3.2 s") == "rose from 420\u00a0ms to 3.2\u00a0s"


# --- drawings ---------------------------------------------------------------------------------------------------------


def _star(explained: Explanation, leaves: int) -> Explanation:
    extra = tuple(GraphNode(f"leaf-{i}", "service", 0.001 * (i == 7), 1.0) for i in range(leaves))
    edges = tuple(GraphEdge("payment", node.node, "calls", 0.0, False) for node in extra)
    return msgspec.structs.replace(explained, nodes=explained.nodes + extra, edges=explained.edges + edges)


def test_a_large_graph_is_cut_to_the_path_the_causes_and_their_neighbours(explained: Explanation) -> None:
    large = _star(explained, 500)
    drawn = drawing.select_nodes(large)
    assert len(drawn) == drawing.MAX_NODES
    assert explained.path is not None
    assert {hop.source for hop in explained.path.hops} | {hop.target for hop in explained.path.hops} <= set(drawn)
    assert {cause.node for cause in explained.causes} <= set(drawn)
    assert "48 of 515 nodes are drawn" in render(large, "html")


def test_nodes_do_not_overlap_and_the_path_is_straight(explained: Explanation) -> None:
    graph = drawing.draw_graph(_star(explained, 30))
    places = [(node.x, node.y) for node in graph.nodes]
    for index, (x, y) in enumerate(places):
        for other_x, other_y in places[:index]:
            assert abs(x - other_x) >= graph.box_width or abs(y - other_y) >= graph.box_height
    by_label = {node.label: node for node in graph.nodes}
    path = ["train/llama-812", "gpu-node-3/gpu-0", "llm-inference", "api-gateway", "checkout"]
    assert len({by_label[name].y for name in path}) == 1
    assert [by_label[name].x for name in path] == sorted(by_label[name].x for name in path)
    assert max(x for x, _ in places) + graph.box_width / 2 < graph.width
    assert max(y for _, y in places) + graph.box_height / 2 < graph.height


def test_a_cyclic_graph_and_a_disconnected_cause_are_drawn(explained: Explanation) -> None:
    loop = (
        *(edge for edge in explained.edges if "train/llama-812" not in (edge.caller, edge.callee)),
        GraphEdge("api-gateway", "checkout", "calls", 0.0, False),
        GraphEdge("checkout", "checkout", "calls", 0.0, False),
    )
    graph = drawing.draw_graph(msgspec.structs.replace(explained, edges=loop))
    leftmost = min(graph.nodes, key=lambda node: node.x)
    assert leftmost.label == "train/llama-812"
    # Only the queue, which nothing connects to the victim or to a cause, is left out.
    assert graph.drawn == len(explained.nodes) - 1


def test_gaps_in_a_series_are_not_bridged(explained: Explanation) -> None:
    charts, left_out = drawing.draw_charts(explained)
    assert (len(charts), left_out) == (4, 0)
    # One gap of four missing samples splits the line once.
    assert charts[0].line.count("M") == 2


def test_charts_without_a_measurement_are_not_drawn(inconclusive: Explanation) -> None:
    assert drawing.draw_charts(inconclusive) == ((), 0)


def test_a_spike_survives_thinning(explained: Explanation) -> None:
    start = explained.impact.baseline_window.start.timestamp()
    values = [1.0] * 4000
    values[1777] = 99.0
    spiky = msgspec.structs.replace(
        explained.series[0], timestamps=tuple(start + i for i in range(4000)), values=tuple(values)
    )
    (chart,), _ = drawing.draw_charts(msgspec.structs.replace(explained, series=(spiky,)))
    heights = [float(point.split()[1]) for point in re.split("[ML]", chart.line) if point]
    assert len(heights) < 1000
    assert min(heights) < 20 < max(heights)


@pytest.mark.parametrize(("low", "high"), [(0, 3.6), (0.95, 0.99), (-3, 12), (5, 5), (0, 0), (1e-9, 2e-9), (0, 7e12)])
def test_axis_ticks_cover_the_data_with_round_values(low: float, high: float) -> None:
    ticks = drawing.nice_ticks(low, high)
    assert 2 <= len(ticks) <= 7
    assert ticks[0] <= low
    assert high <= ticks[-1]


def test_bars_reach_as_far_as_their_intervals(explained: Explanation) -> None:
    group = drawing.draw_bars(explained.attribution[0])
    lowest = group.bars[2]
    assert lowest.low == 0.0
    assert 0 < group.zero < 5
    assert all(0 <= bar.low <= bar.high <= 100 for bar in group.bars)
    assert group.bars[3].extrapolates
