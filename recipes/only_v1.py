"""For `vllm serve --middleware`: nothing but /v1, which VLLM_API_KEY protects, and /health can be reached.

vLLM asks for no key elsewhere, such as /invocations, which generates as /v1 does.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response


async def only_v1(request: Request, call_next: Callable[[Request], Awaitable[Any]]) -> Any:
    path = request.scope["path"]
    return await call_next(request) if path == "/health" or path.startswith("/v1/") else Response(status_code=404)
