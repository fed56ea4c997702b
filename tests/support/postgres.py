"""A real PostgreSQL in a folder of its own, run by a user without privileges, since it refuses to run as root."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.services import absent


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """Run a server that listens on a socket only; give the URL of its (empty) database."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    if not folders:
        absent("not installed: postgresql (scripts/ci_services.sh installs it)")
    if os.geteuid() == 0:
        try:
            user = pwd.getpwnam("postgres")
        except KeyError:
            absent("there is no user postgres to run PostgreSQL")
        owner = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    else:
        user, owner = pwd.getpwuid(os.geteuid()), {}
    # Not tmp_path: the path of a unix socket has to be short, and its user must be able to reach it.
    folder = Path(tempfile.mkdtemp(prefix="pg"))
    os.chown(folder, user.pw_uid, user.pw_gid)
    programs = folders[-1]

    def run(program: str, *arguments: str | Path) -> None:
        with (folder / "log").open("a") as log:
            command = [programs / program, "-D", folder / "data", *arguments]
            done = subprocess.run(command, cwd=folder, stdout=log, stderr=log, check=False, **owner)
        assert done.returncode == 0, (folder / "log").read_text()

    try:
        run("initdb", "-A", "trust", "-U", "prioscope", "--no-sync", "--encoding=UTF8", "--locale=C")
        run("pg_ctl", "-w", "-o", f"-k {folder} -c listen_addresses= -c max_connections=100", "start")
        try:
            yield f"postgresql://prioscope@/postgres?host={folder}"
        finally:
            run("pg_ctl", "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
