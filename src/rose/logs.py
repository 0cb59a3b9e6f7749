"""Logs of our services: one JSON object a line."""

from __future__ import annotations

import json
import logging
import time


class JsonLines(logging.Formatter):
    """`extra={"facts": {...}}` adds fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_as_json(level: int = logging.INFO) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    root = logging.getLogger("rose")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False
