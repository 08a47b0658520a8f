"""Logging: structlog events as JSON lines; ids bound once per reconcile; library records by the same door.

Exceptions are logged with frames and never with locals, which hold secrets. `configure` is called first.
"""

import logging
import sys
from enum import Enum
from typing import Any, Literal

import orjson
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def configure(*, level: str = "info", style: Literal["json", "console"] = "json") -> None:
    """Set up structlog and stdlib logging for this process; lines go to standard error."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        _plain_words,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if style == "json":
        frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False, max_frames=20)
        last: list[Processor] = [structlog.processors.ExceptionRenderer(frames), _render_json]
    else:
        plain = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
        last = [plain]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    root.handlers[:] = [_Bridge()]
    root.setLevel(max(LEVELS[level], logging.INFO))
    for noisy in ("alembic", "apscheduler", "uvicorn", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _plain_words(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
    """Members of an enumeration as the words they stand for, whatever renders them."""
    return {key: value.value if isinstance(value, Enum) else value for key, value in event.items()}


def _render_json(_logger: WrappedLogger, _name: str, event: EventDict) -> str:
    return orjson.dumps(event, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


class _Bridge(logging.Handler):
    """Hands a library's record to structlog, its traceback included."""

    def emit(self, record: logging.LogRecord) -> None:
        log: Any = structlog.get_logger()
        write = {"DEBUG": log.debug, "INFO": log.info, "WARNING": log.warning}.get(
            record.levelname, log.error
        )
        write(record.getMessage(), logger=record.name, exc_info=record.exc_info or None)
