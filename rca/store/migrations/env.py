"""Run by Alembic: `rca.store.migrate` hands over a connection."""

from alembic import context

from rca.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    # SQLite cannot alter most of a table in place.
    render_as_batch=True,
    transaction_per_migration=False,
)
context.run_migrations()
