"""The HTTP side: keys, limits, whole answers and streams of server-sent events."""

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from mingpt.data.chat import answer_of, prompt_of
from mingpt.data.vocabulary import TextVocabulary
from mingpt.errors import UserError
from mingpt.serve.api import Answer, ChatRequest, CompletionRequest, Refused, Request, request_of
from mingpt.serve.worker import Job, Piece, Worker

RETRY_SECONDS = 1
BYTES_A_TOKEN = 16  # of a request, at most: JSON may spell a character in twelve bytes
OTHER_BYTES = 64 * 1024
# The page has everything in it, and asks only this server.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


@dataclass(frozen=True)
class Served:
    """What is served, and its limits. chat: it was trained on conversations. ends: the token that ends a text."""

    worker: Worker
    vocabulary: TextVocabulary
    name: str
    step: int
    digest: str
    chat: bool
    ends: int | None
    most_prompt: int
    most_tokens: int
    seconds: float
    key: str | None

    def new_answer(self, chat: bool) -> Answer:
        id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        return Answer(id, int(time.time()), self.name, self.digest[:16], chat)


def to_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(content), status, headers, media_type="application/json")


def refusal(error: Refused) -> Response:
    headers = {429: {"Retry-After": str(RETRY_SECONDS)}, 401: {"WWW-Authenticate": "Bearer"}}.get(error.status)
    return to_response(error.to_json(), error.status, headers)


def as_refused(error: Exception) -> Refused:
    """What a request is told about an error of its generation."""
    if isinstance(error, Refused):
        return error
    return Refused(500, str(error) if isinstance(error, UserError) else "the generation failed: see the server's log")


async def body_of(request: HTTPRequest, most: int, seconds: float) -> bytes:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(400, "the header Content-Type must be application/json")

    async def read() -> bytes:
        content = bytearray()
        async for chunk in request.stream():
            content += chunk
            if len(content) > most:
                raise Refused(413, f"the request has more than {most} bytes: shorten the prompt", "request_too_large")
        return bytes(content)

    try:
        return await asyncio.wait_for(read(), seconds)
    except asyncio.TimeoutError as error:
        raise Refused(408, f"the request did not arrive within {seconds:g} s", "timeout") from error


def check_key(served: Served, request: HTTPRequest) -> None:
    given = request.headers.get("authorization", "")
    if served.key is not None and not hmac.compare_digest(given.encode("latin-1"), f"Bearer {served.key}".encode()):
        raise Refused(401, "a key is needed: send the header Authorization: Bearer KEY", "invalid_api_key")


def encoded(served: Served, asked: CompletionRequest | ChatRequest) -> list[int]:
    """The prompt's tokens."""
    name = "messages" if isinstance(asked, ChatRequest) else "prompt"
    try:
        if isinstance(asked, ChatRequest):
            tokens = prompt_of(asked.messages, served.vocabulary)
        elif isinstance(asked.prompt, str):
            tokens = served.vocabulary.encode(asked.prompt)
        else:
            tokens = asked.prompt
    except (UserError, ValueError) as error:
        raise Refused(400, f"{name}: {error}", param=name) from error
    if not tokens:
        raise Refused(400, "prompt: empty: give at least one character, or token", param=name)
    if wrong := [t for t in tokens if not 0 <= t < served.vocabulary.size]:
        raise Refused(400, f"prompt: {wrong[0]} is no token: they are 0 to {served.vocabulary.size - 1}", param=name)
    if len(tokens) > served.most_prompt:
        message = f"{name}: {len(tokens)} tokens: this server takes at most {served.most_prompt}"
        raise Refused(413, message, "context_length_exceeded", name)
    return tokens


def job_of(served: Served, asked: Request, prompt: list[int], default_tokens: int) -> Job:
    most = getattr(asked, "max_completion_tokens", None) or asked.max_tokens or min(default_tokens, served.most_tokens)
    if most > served.most_tokens:
        message = f"max_tokens: {most}: this server adds at most {served.most_tokens} tokens"
        raise Refused(400, message, param="max_tokens")
    return Job(
        prompt=prompt,
        tokens=most,
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        seed=secrets.randbits(32) if asked.seed is None else asked.seed,
        stops=asked.stop,
        ends=served.ends,
        loop=asyncio.get_running_loop(),
    )


@contextmanager
def limited(served: Served, job: Job) -> Any:
    """While somebody waits for this job, at most for so many seconds."""
    late = Refused(503, f"the answer was not complete within {served.seconds:g} s: ask for fewer tokens", "timeout")
    timer = job.loop.call_later(served.seconds, job.put, late)
    try:
        yield
    finally:
        timer.cancel()
        served.worker.leave(job)


async def arriving(job: Job) -> AsyncIterator[Piece]:
    """The job's pieces, up to the last one. Raises Refused if it ends with an error."""
    while True:
        item = await job.arrived.get()
        if isinstance(item, Exception):
            raise as_refused(item) from item
        yield item
        if item.finish:
            return


def usage_of(job: Job, tokens: int) -> dict[str, int]:
    prompt = len(job.prompt)
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


async def whole(request: HTTPRequest, served: Served, job: Job, answer: Answer) -> Response:
    async def collect() -> Response:
        pieces = [piece async for piece in arriving(job)]
        text = "".join(piece.text for piece in pieces)
        last = pieces[-1]
        text = answer_of(text) if answer.chat else text
        return to_response(answer.whole(text, last.finish or "", usage_of(job, last.tokens)))

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    with limited(served, job):
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(collect()), asyncio.create_task(gone())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                raise ClientDisconnect
            response: Response = tasks[0].result()
            return response
        finally:
            for task in tasks:
                task.cancel()


async def events(served: Served, job: Job, answer: Answer, with_usage: bool) -> AsyncIterator[str]:
    """Server-sent events. An error after the first one is an event, too: the status is sent already."""
    with limited(served, job):
        tokens, begun = 0, not answer.chat
        try:
            async for piece in arriving(job):
                tokens = piece.tokens
                text = piece.text if begun else answer_of(piece.text)
                begun = begun or bool(piece.text)
                yield f"data: {json.dumps(answer.chunk(text, piece.finish))}\n\n"
            if with_usage:
                yield f"data: {json.dumps(answer.usage(usage_of(job, tokens)))}\n\n"
        except Refused as error:
            yield f"data: {json.dumps(error.to_json())}\n\n"
        yield "data: [DONE]\n\n"


def check_model(served: Served, name: str) -> None:
    if name != served.name:
        raise Refused(404, f"model: {name!r} is not here: this server has {served.name}", "model_not_found", "model")


async def complete(request: HTTPRequest, served: Served, kind: type[CompletionRequest] | type[ChatRequest]) -> Response:
    check_key(served, request)
    chat = kind is ChatRequest
    if chat and not served.chat:
        raise Refused(404, f"{served.name} was not trained on conversations (data=chat): use /v1/completions")
    raw = await body_of(request, BYTES_A_TOKEN * served.most_prompt + OTHER_BYTES, served.seconds)
    asked = request_of(kind, raw)
    check_model(served, asked.model)
    prompt = await run_in_threadpool(encoded, served, asked)
    job, answer = job_of(served, asked, prompt, served.most_tokens if chat else 16), served.new_answer(chat)
    served.worker.submit(job)
    if not asked.stream:
        return await whole(request, served, job, answer)
    with_usage = asked.stream_options is not None and asked.stream_options.include_usage
    stream = events(served, job, answer, with_usage)
    return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def routes(served: Served) -> list[Route]:
    def about_model() -> dict[str, Any]:
        return {"id": served.name, "object": "model", "created": 0, "owned_by": "mingpt"}

    def page(request: HTTPRequest) -> Response:
        content = files("mingpt.serve").joinpath("page.html").read_text()
        return HTMLResponse(content, headers={"Content-Security-Policy": POLICY})

    def health(request: HTTPRequest) -> Response:
        worker = served.worker
        fit = worker.thread.is_alive() and not worker.draining
        state = "ok" if fit else "stopping" if worker.draining else "failed"
        about = {"model": served.name, "step": served.step, "digest": served.digest}
        now = {"status": state, "generating": worker.running is not None, "waiting": len(worker.waiting)}
        return to_response(now | about, 200 if fit else 503)

    def models(request: HTTPRequest) -> Response:
        check_key(served, request)
        return to_response({"object": "list", "data": [about_model()]})

    def model(request: HTTPRequest) -> Response:
        check_key(served, request)
        check_model(served, request.path_params["name"])
        return to_response(about_model())

    async def completions(request: HTTPRequest) -> Response:
        return await complete(request, served, CompletionRequest)

    async def chat_completions(request: HTTPRequest) -> Response:
        return await complete(request, served, ChatRequest)

    return [
        Route("/", page),
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    ]


async def _on_refused(request: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return refusal(error)


async def _on_http(request: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: "there is no such page", 405: f"{request.method} is not allowed here"}.get(error.status_code)
    return refusal(Refused(error.status_code, f"{request.url.path}: {what or error.detail}"))


async def _on_gone(request: HTTPRequest, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _on_crash(request: HTTPRequest, error: Exception) -> Response:
    return refusal(Refused(500, "this server failed: see its log"))


def app_of(served: Served) -> Starlette:
    handlers: dict[Any, Callable[..., Any]] = {
        Refused: _on_refused, HTTPException: _on_http, ClientDisconnect: _on_gone, Exception: _on_crash,
    }  # fmt: skip
    return Starlette(routes=routes(served), exception_handlers=handlers)
