"""The command line: exit codes, streams, formats, and what a call imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

import cli.main
from cli.output import use_colour
from rca.errors import InvalidInputError, NotFoundError, SourceUnreachableError
from rca.explanation import Explanation, from_json, to_json
from rca.incident import Incident
from rca.provenance import seal


class Engine(ModuleType):
    """Stands in for `rca.explain`: returns what the test gives it and records how it was called."""

    def __init__(self) -> None:
        super().__init__("rca.explain")
        self.answer: Explanation | Exception = RuntimeError("no answer set")
        self.calls: list[dict[str, object]] = []

    def Options(self, **options: object) -> dict[str, object]:  # noqa: N802
        return options

    def explain(self, incident: Incident, options: dict[str, object]) -> Explanation:
        self.calls.append({"incident": incident, **options})
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    stand_in = Engine()
    monkeypatch.setitem(sys.modules, "rca.explain", stand_in)
    return stand_in


@pytest.fixture
def bundle(incident: Incident, tmp_path: Path) -> Path:
    return incident.write(tmp_path / "incident.zip")


def rca(*arguments: object) -> int:
    return cli.main.main([str(argument) for argument in arguments])


# --- rca --------------------------------------------------------------------------------------------------------------


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert rca("--help") == 0
    shown = capsys.readouterr().out
    for name in cli.main.COMMANDS:
        assert name in shown
    assert "Exit codes" in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert rca("--version") == 0
    assert capsys.readouterr().out.startswith("prioscope ")


def test_a_misspelt_command_is_a_usage_error_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert rca("explian") == 2
    assert "Did you mean 'explain'?" in capsys.readouterr().err


@pytest.mark.parametrize("command", list(cli.main.COMMANDS))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert rca(command, "--help") == 0
    assert f"rca {command}" in capsys.readouterr().out


# --- rca explain ------------------------------------------------------------------------------------------------------


def test_explain_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert rca("explain", "--help") == 0
    shown = capsys.readouterr().out
    assert "$ rca explain incident.zip" in shown
    assert "-o json" in shown


def test_an_explained_incident_exits_0_with_the_report_on_stdout(
    engine: Engine, bundle: Path, incident: Incident, explained: Explanation, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.answer = explained
    assert rca("explain", bundle) == 0
    out, err = capsys.readouterr()
    assert "Likely cause" in out
    assert err == ""
    (call,) = engine.calls
    assert isinstance(call["incident"], Incident)
    assert call["incident"].equals(incident)


def test_an_inconclusive_incident_exits_4_and_is_still_printed(
    engine: Engine, bundle: Path, inconclusive: Explanation, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.answer = inconclusive
    assert rca("explain", bundle) == 4
    assert "Inconclusive" in capsys.readouterr().out


def test_options_reach_the_engine(engine: Engine, bundle: Path, explained: Explanation) -> None:
    engine.answer = explained
    assert rca("explain", bundle, "--top", 2, "--min-confidence", 0.7, "--victim", "db", "--metric", "error_ratio") == 0
    (call,) = engine.calls
    del call["incident"]
    assert call == {"top": 2, "min_confidence": 0.7, "victim": "db", "metric": "error_ratio"}


@pytest.mark.parametrize("flag", ["-o", "--output", "--format", "-f"])
def test_json_output_is_only_json(
    flag: str, engine: Engine, bundle: Path, explained: Explanation, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    engine.answer = explained
    assert rca("explain", bundle, flag, "json") == 0
    assert capsysbinary.readouterr().out == to_json(explained)


@pytest.mark.parametrize(
    ("file", "start"),
    [("r.html", "<!doctype html>"), ("r.md", "# "), ("r.json", "{"), ("r.txt", "INC-4711"), ("r", "INC-4711")],
)
def test_out_chooses_the_format_by_suffix(
    file: str,
    start: str,
    engine: Engine,
    bundle: Path,
    explained: Explanation,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine.answer = explained
    assert rca("explain", bundle, "--out", tmp_path / file) == 0
    assert (tmp_path / file).read_text(encoding="utf-8").startswith(start)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidInputError("the baseline is empty", cure="capture more"), 2),
        (NotFoundError("no node 'x'", cure="capture more"), 3),
        (SourceUnreachableError("prometheus did not answer", cure="capture more"), 5),
    ],
)
def test_expected_failures_are_one_line_and_a_cure(
    error: Exception, code: int, engine: Engine, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.answer = error
    assert rca("explain", bundle) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"error: {error}\ncure: capture more\n"


def test_a_missing_bundle_exits_3(engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rca("explain", tmp_path / "nothing.zip") == 3
    assert "nothing.zip" in capsys.readouterr().err


def test_a_damaged_bundle_exits_2(engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.zip").write_bytes(b"not a zip")
    assert rca("explain", tmp_path / "bad.zip") == 2
    assert "neither a directory nor a zip" in capsys.readouterr().err


def test_an_error_cannot_drive_the_terminal(engine: Engine, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine.answer = NotFoundError("no node 'a\x1b[2J\nb'")
    assert rca("explain", bundle) == 3
    assert capsys.readouterr().err == "error: no node 'a\\x1b[2J\\nb'\n"


@pytest.mark.parametrize(
    "arguments", [("--top", "0"), ("--min-confidence", "1.5"), ("-o", "pdf"), ("--nonsense",)], ids=" ".join
)
def test_wrong_options_exit_2(arguments: tuple[str, ...], engine: Engine, bundle: Path) -> None:
    assert rca("explain", bundle, *arguments) == 2
    assert engine.calls == []


def test_an_unwritable_out_exits_2(
    engine: Engine, bundle: Path, explained: Explanation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.answer = explained
    assert rca("explain", bundle, "--out", tmp_path / "no" / "such" / "folder.html") == 2
    assert "cannot write" in capsys.readouterr().err


def test_an_interrupt_exits_130(engine: Engine, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "explain", interrupt)
    assert rca("explain", bundle) == 130


# --- colour -----------------------------------------------------------------------------------------------------------


class _Terminal:
    def __init__(self, interactive: bool = True) -> None:
        self.interactive = interactive

    def isatty(self) -> bool:
        return self.interactive


def test_colour_follows_the_terminal_and_the_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert use_colour(False, _Terminal())  # type: ignore[arg-type]
    assert not use_colour(True, _Terminal())  # type: ignore[arg-type]
    assert not use_colour(False, _Terminal(interactive=False))  # type: ignore[arg-type]
    monkeypatch.setenv("NO_COLOR", "")
    assert use_colour(False, _Terminal()), "an empty NO_COLOR does not count"  # type: ignore[arg-type]
    monkeypatch.setenv("NO_COLOR", "1")
    assert not use_colour(False, _Terminal())  # type: ignore[arg-type]
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not use_colour(False, _Terminal())  # type: ignore[arg-type]


# --- rca verify -------------------------------------------------------------------------------------------------------


@pytest.fixture
def sealed(explained: Explanation, incident: Incident, tmp_path: Path) -> Path:
    path = tmp_path / "explanation.json"
    path.write_bytes(to_json(seal(explained, incident)))
    return path


def test_verify_accepts_an_untouched_pair(sealed: Path, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rca("verify", sealed, "--incident", bundle) == 0
    assert capsys.readouterr().out.startswith("ok: 6 steps, grade C, chain ")


def test_verify_names_a_changed_bundle(
    sealed: Path, incident: Incident, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shorter = incident.replace(metrics=incident.metrics.slice(1)).write(tmp_path / "other.zip")
    assert rca("verify", sealed, "--incident", shorter) == 1
    assert "step 2 (metrics): the content differs" in capsys.readouterr().err


def test_verify_names_an_edited_explanation(sealed: Path, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited = msgspec.structs.replace(from_json(sealed.read_bytes()), no_cause_probability=0.0)
    sealed.write_bytes(to_json(edited))
    assert rca("verify", sealed, "--incident", bundle) == 1
    assert "step 6 (explanation): the content differs" in capsys.readouterr().err


def test_verify_refuses_a_field_that_no_explanation_has(
    sealed: Path, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(sealed.read_bytes())
    document["causes"][0]["approved_by"] = "somebody"
    sealed.write_text(json.dumps(document))
    assert rca("verify", sealed, "--incident", bundle) == 2
    assert "unknown field `approved_by` - at `$.causes[0]`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (None, 3, "no explanation at"),
        (b"{}", 2, "is not an explanation"),
        (b"\xff\xfe", 2, "is not an explanation"),
        (b'{"schema_version": 99}', 2, "has schema version 99"),
    ],
)
def test_verify_refuses_what_it_cannot_read(
    content: bytes | None, code: int, message: str, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "e.json"
    if content is not None:
        path.write_bytes(content)
    assert rca("verify", path, "--incident", bundle) == code
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 2


# --- whole processes --------------------------------------------------------------------------------------------------

_ROOT = Path(cli.main.__file__).parents[1]


def run(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=_ROOT,
        env={**os.environ, **environment},
        timeout=120,
        check=False,
    )


_REPORT_MODULES = """
import json, sys
from cli.main import main
code = main(sys.argv[1:])
print(json.dumps({"code": code, "modules": sorted({name.partition(".")[0] for name in sys.modules})}), file=sys.stderr)
"""


@pytest.mark.parametrize("format", ["text", "json", "markdown", "html"])
def test_explain_imports_nothing_heavy(bundle: Path, format: str) -> None:
    done = run(_REPORT_MODULES, "explain", bundle, "-o", format)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stderr.splitlines()[-1])
    assert answer["code"] in {0, 4}, done.stderr
    heavy = {"torch", "torch_geometric", "pandas", "scipy", "dowhy", "matplotlib", "sklearn", "onnx"}
    assert heavy & set(answer["modules"]) == set()


def test_two_runs_give_the_same_json(bundle: Path) -> None:
    first, second = (
        run(
            "import sys; from cli.main import main; sys.exit(main(sys.argv[1:]))",
            "explain",
            bundle,
            "-o",
            "json",
            PYTHONHASHSEED=seed,
        )
        for seed in ("1", "2")
    )
    assert first.returncode in {0, 4}, first.stderr
    assert first.stdout == second.stdout


def test_listing_the_commands_imports_no_data_library() -> None:
    done = run(_REPORT_MODULES, "--help")
    answer = json.loads(done.stderr.splitlines()[-1])
    assert {"pyarrow", "networkx", "onnxruntime", "torch"} & set(answer["modules"]) == set()


def test_a_closed_pipe_is_no_error(sealed: Path, bundle: Path) -> None:
    # The reader is gone before anything is written.
    code = (
        "import os, sys\nr, w = os.pipe(); os.close(r); os.dup2(w, 1)\n"
        "from cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    done = run(code, "verify", sealed, "--incident", bundle)
    assert (done.returncode, done.stderr) == (0, "")


def test_output_is_utf8_whatever_the_locale(sealed: Path, bundle: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from cli.output import emit; from rca.explanation import from_json\n"
        "from rca.report import render; emit(render(from_json(Path(sys.argv[1]).read_bytes()), 'text'))"
    )
    done = run(code, sealed, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "→" in done.stdout
