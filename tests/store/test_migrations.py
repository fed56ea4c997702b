"""Migrations lead to exactly the tables that the code uses, and never over somebody else's."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text

from rca.errors import InvalidInputError
from rca.store import migrate, open_store
from rca.store.connect import connect
from rca.store.schema import metadata


def test_the_migrations_make_the_tables(url: str) -> None:
    open_store(url).close()
    engine = connect(url, must_exist=True, pool=2)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
    engine.dispose()


def test_down_and_up_again(url: str) -> None:
    open_store(url).close()
    engine = connect(url, must_exist=True, pool=2)
    with engine.execution_options(write=True).begin() as connection:
        settings = migrate.config(connection)
        scripts = ScriptDirectory.from_config(settings)
        assert scripts.get_current_head() == migrate.HEAD
        command.downgrade(settings, "base")
        assert set(inspect(connection).get_table_names()) == {"alembic_version"}
    engine.dispose()
    with pytest.raises(InvalidInputError, match="other tables"):
        open_store(url)


def test_many_that_start_together_migrate_once(url: str) -> None:
    with ThreadPoolExecutor(6) as pool:
        stores = list(pool.map(lambda _: open_store(url), range(6)))
    assert len({store.writer for store in stores}) == 1
    for store in stores:
        store.close()


def test_a_newer_schema_and_a_foreign_database_are_left_alone(url: str) -> None:
    open_store(url).close()
    engine = connect(url, must_exist=True, pool=2)
    with engine.execution_options(write=True).begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(InvalidInputError, match="has schema 9999; this prioscope knows up to"):
        open_store(url)
    with engine.execution_options(write=True).begin() as connection:
        connection.execute(text("DROP TABLE alembic_version"))
    engine.dispose()
    with pytest.raises(InvalidInputError, match="holds other tables"):
        open_store(url)


def test_the_wheel_would_hold_the_migrations() -> None:
    folder = Path(migrate.__file__).parent / "migrations"
    assert (folder / "env.py").is_file()
    assert sorted(path.name for path in (folder / "versions").glob("v*.py"))[-1].startswith(f"v{migrate.HEAD}")


def test_an_explanation_of_a_bundle_imports_no_database() -> None:
    code = (
        "import sys, rca.store, cli.explain, cli.incidents, cli.watch; "
        "print([m for m in ('sqlalchemy', 'alembic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert done.stdout.strip() == "[]"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInputError, match="cannot make the store"):
        open_store(str(tmp_path / "file" / "store.db"))
