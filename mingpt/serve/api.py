"""The API's JSON, as OpenAI has it: what a request may say, what is answered, and what an error is."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

MOST_STOPS, LONGEST_STOP = 4, 256
# What OpenAI's requests may hold and this server does not do, each with the value that asks for nothing.
NOT_HERE: dict[str, Any] = {
    "n": 1, "best_of": 1, "echo": False, "logprobs": False, "top_logprobs": 0, "suffix": "",
    "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {},
    "tools": [], "response_format": {"type": "text"},
}  # fmt: skip


class Refused(Exception):
    """The answer to a request is this error."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def to_json(self) -> dict[str, Any]:
        kind = {429: "rate_limit_error"}.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class StreamOptions(BaseModel):
    include_usage: bool = False


class Request(BaseModel):
    """What both kinds of requests have. top_k is not OpenAI's."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    temperature: float = Field(default=1, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: list[str] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    user: str | None = None  # it changes nothing

    @field_validator("stop", mode="before")
    @classmethod
    def _several(cls, stop: object) -> object:
        stops = [stop] if isinstance(stop, str) else stop
        if isinstance(stops, list) and (len(stops) > MOST_STOPS or any(not s for s in stops)):
            raise ValueError(f"give at most {MOST_STOPS} texts, none of them empty")
        if isinstance(stops, list) and any(isinstance(s, str) and len(s) > LONGEST_STOP for s in stops):
            raise ValueError(f"a text may have at most {LONGEST_STOP} characters")
        return stops


class CompletionRequest(Request):
    prompt: str | list[int]


class ChatRequest(Request):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = Field(default=None, ge=1)  # the newer name of max_tokens


R = TypeVar("R", bound=Request)


def request_of(kind: type[R], raw: bytes) -> R:
    """A request's JSON. Raises Refused, which names the parameter."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refused(400, "the body is not JSON") from error
    if not isinstance(body, dict):
        raise Refused(400, "the body is no JSON object")
    body = {name: value for name, value in body.items() if value is not None}
    for name in NOT_HERE.keys() & body.keys():
        value, nothing = body.pop(name), NOT_HERE[name]
        if value != nothing or isinstance(value, bool) != isinstance(nothing, bool):
            raise Refused(400, f"{name}: this server does not do that: leave it out", "unsupported_parameter", name)
    try:
        return kind.model_validate(body)
    except ValidationError as errors:
        found = errors.errors()[0]
        name = str(found["loc"][0])
        message = "this server has no such parameter: leave it out"
        if name == "prompt" and found["type"] != "missing":
            message = "must be one text, or a list of token ids"
        elif found["type"] != "extra_forbidden":
            message = found["msg"].removeprefix("Value error, ").removeprefix("Input ").replace("should", "must")
        raise Refused(400, f"{name}: {message}", param=name) from errors


@dataclass(frozen=True)
class Answer:
    """Makes the JSON of one answer, whole or in chunks. fingerprint: of the weights."""

    id: str
    created: int
    model: str
    fingerprint: str
    chat: bool

    def whole(self, text: str, finish: str, usage: Mapping[str, int]) -> dict[str, Any]:
        content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return self._around("chat.completion" if self.chat else "text_completion", content, finish) | {"usage": usage}

    def chunk(self, text: str, finish: str | None) -> dict[str, Any]:
        content = {"delta": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return self._around("chat.completion.chunk" if self.chat else "text_completion", content, finish)

    def usage(self, usage: Mapping[str, int]) -> dict[str, Any]:
        """The chunk after the last one, if stream_options asks for it."""
        return self.chunk("", None) | {"choices": [], "usage": usage}

    def _around(self, kind: str, content: Mapping[str, Any], finish: str | None) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": finish}],
        }
