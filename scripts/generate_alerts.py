"""Write every file that is generated from alerts/: the rules, Alertmanager's configurations, the chart's copy.

python scripts/generate_alerts.py
"""

from __future__ import annotations

from pathlib import Path

from alerts import routing
from alerts.build import HEADER, Format, data, dump, files, rule_groups
from alerts.model import Options

ROOT = Path(__file__).parents[1]


def generated() -> dict[Path, str]:
    """Return the content of each file."""
    options = Options()
    folder = ROOT / "alerts" / "generated"
    found = {folder / name: text for format_ in Format for name, text in files(options, format_).items()}
    found[folder / "alertmanager.yml"] = routing.text()
    # Under the names of deploy/compose.yaml.
    found[ROOT / "deploy" / "alertmanager" / "alertmanager.yml"] = routing.text(
        "http://serve:9945", "/run/secrets/rca-token"
    )
    groups = [data(group, options) for group in rule_groups(options)]
    found[ROOT / "deploy" / "helm" / "prioscope" / "files" / "rules.yaml"] = HEADER + dump({"groups": groups})
    return found


if __name__ == "__main__":
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
