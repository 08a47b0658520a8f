"""Postgres: tables, the engine, and one module of query functions for each subject."""
