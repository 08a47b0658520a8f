"""Every word that people and scripts may meet stands on the page that explains it."""

import inspect
import re
from enum import StrEnum
from pathlib import Path

import pytest

from app.api import reasons

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
# Sentences and the types of conditions stand there in other forms.
KINDS = [
    kind
    for _, kind in inspect.getmembers(reasons, inspect.isclass)
    if issubclass(kind, StrEnum) and kind not in (StrEnum, reasons.PodMessage)
]


@pytest.mark.parametrize("word", sorted({str(word) for kind in KINDS for word in kind}))
def test_every_reason_stands_on_the_page(word):
    assert re.search(rf"`{re.escape(word)}`", PAGE), word


@pytest.mark.parametrize("type_", [reasons.PLACED_CONDITION, reasons.MACHINES_KNOWN_CONDITION])
def test_our_condition_types_stand_on_the_page(type_):
    assert f"`{type_}`" in PAGE


def test_the_readme_leads_to_the_page():
    assert "(docs/troubleshooting.md)" in (ROOT / "README.md").read_text("utf-8")
