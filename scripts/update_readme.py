"""Put the real output of `rca demo` into README.md, between its two markers; run it when the output changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- demo output: begin -->", "<!-- demo output: end -->"


def main() -> int:
    """Rewrite the section; return 1 when the demo fails or the markers are missing."""
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "cli.main", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=README.parent, check=False)
    if done.returncode != 0:
        print(f"error: rca demo exited with {done.returncode}\n{done.stderr}", file=sys.stderr)
        return 1
    text = README.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        print(f"error: {README} lacks the markers {BEGIN} and {END}", file=sys.stderr)
        return 1
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    README.write_text(f"{before}{BEGIN}\n```text\n{done.stdout.rstrip()}\n```\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
