"""``python -m app.cli``, for children that must run this very installation."""

from app.cli import main

main(prog_name="nebula")
