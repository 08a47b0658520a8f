"""Alembic's scripts. They ship in the wheel and run in-process: `app.store.migrate`."""
