"""Answers to what is wrong, in vLLM's words and shape."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

MOST_BYTES = 64 << 20
"""Of a body: prompts of a large batch fit, mistakes do not."""
RETRY_AFTER_S = 1


class Wrong(Exception):
    """What the client asks cannot be done; it gets one sentence."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


def describe(status: int, message: str, kind: str) -> dict[str, Any]:
    return {"message": message, "type": kind, "param": None, "code": status}


def answer(status: int, message: str, kind: str = "BadRequestError") -> Response:
    error = describe(status, message, kind)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 429 else {}
    return json({"error": error}, status, headers)


def json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


END = b"data: [DONE]\n\n"


def event(content: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


async def read_bytes(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MOST_BYTES:
            raise Wrong(413, f"the body is larger than {MOST_BYTES >> 20} MB")
        parts.append(part)
    return b"".join(parts)


async def read(request: Request) -> dict[str, Any]:
    """The body as a JSON object."""
    try:
        body = msgspec.json.decode(await read_bytes(request))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Wrong(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Wrong(400, "the body is not a JSON object")
    return body
