"""`mingpt serve`: OpenAI's own client against a real server; limits, errors, and the texts of `mingpt generate`."""

import http.client
import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from openai import APIError, APIStatusError, OpenAI
from starlette.testclient import TestClient

import bpe_kit
from mingpt.commands import generate
from mingpt.data.chat import prompt_of
from mingpt.data.vocabulary import Characters
from mingpt.serve import command
from mingpt.serve.app import app_of
from mingpt.serve.worker import Stops
from node_kit import Node, wait_until
from paths_kit import ROOT
from serve_kit import CHARACTERS, NAME, served_for, serving, trained

LONG = 1_000_000  # tokens: nobody waits for them


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def address(run: Path) -> Iterator[str]:
    with serving(served_for(run)) as address:
        yield address


@pytest.fixture
def client(address: str) -> OpenAI:
    return OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def asked(run: Path, body: Any, path: str = "/v1/completions", **changed: Any) -> tuple[int, Any]:
    """A request's status and answer, without a network."""
    headers = {"Content-Type": "application/json"}
    raw = body if isinstance(body, bytes) else json.dumps({"model": NAME, **body}).encode()
    answer = TestClient(app_of(served_for(run, **changed))).post(path, content=raw, headers=headers)
    return answer.status_code, answer.json()


def test_a_client_of_openai_gets_the_text_that_generate_writes(
    run: Path, client: OpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--prompt", "abé", "--tokens", "30", "--temperature", "20", "--seed", "3"]
    assert generate.main([str(run), *options, "--top-p", "0.9", "--top-k", "9"]) == 0
    expected = capsys.readouterr().out.removesuffix("\n")
    how: dict[str, Any] = {"max_tokens": 30, "temperature": 20, "seed": 3, "top_p": 0.9, "extra_body": {"top_k": 9}}
    done = client.completions.create(model=NAME, prompt="abé", **how)
    assert "abé" + done.choices[0].text == expected
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (3, 30, 33)
    ids = Characters(CHARACTERS).encode("abé")
    assert client.completions.create(model=NAME, prompt=ids, **how).choices[0].text == done.choices[0].text
    stream = client.completions.create(
        model=NAME, prompt="abé", stream=True, stream_options={"include_usage": True}, **how
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == done.choices[0].text
    assert len(chunks) == 31
    assert chunks[-1].usage == done.usage
    assert [model.id for model in client.models.list()] == [NAME]


def test_a_client_of_openai_gets_errors_that_name_the_parameter(client: OpenAI) -> None:
    def error(**body: Any) -> tuple[int, str | None, str]:
        with pytest.raises(APIStatusError) as raised:
            client.completions.create(**{"model": NAME, "prompt": "ab"} | body)
        return raised.value.status_code, raised.value.param, raised.value.message

    assert error(model="gpt-4")[:2] == (404, "model")
    assert error(max_tokens=10_000)[:2] == (400, "max_tokens")
    assert error(logprobs=1)[:2] == (400, "logprobs")
    assert error(n=2)[:2] == (400, "n")
    assert error(temperature=-1)[:2] == (400, "temperature")
    assert error(stop=["a"] * 5)[:2] == (400, "stop")
    assert error(prompt=[10_000])[:2] == (400, "prompt")
    status, param, message = error(prompt="xyz")
    assert (status, param) == (400, "prompt")
    assert "prompt: the text has characters that the model never saw: 'xyz'" in message


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "the body is not JSON"),
        (b"[" * 30_000, 400, "the body is not JSON"),
        (b"[]", 400, "the body is no JSON object"),
        ({"prompt": ""}, 400, "prompt: empty: give at least one character, or token"),
        ({"prompt": ["a"]}, 400, "prompt: must be one text, or a list of token ids"),
        ({"prompt": [True]}, 400, "prompt: must be one text, or a list of token ids"),
        ({}, 400, "prompt: Field required"),
        ({"prompt": "a", "tokens": 3}, 400, "tokens: this server has no such parameter: leave it out"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens: must be greater than or equal to 1"),
        ({"prompt": "a", "top_p": 0}, 400, "top_p: must be greater than 0"),
        ({"prompt": "a", "stop": False}, 400, "stop: must be a valid list"),
        ({"prompt": "a", "model": None}, 400, "model: Field required"),
        ({"prompt": "a", "stop": ""}, 400, "stop: give at most 4 texts, none of them empty"),
        ({"prompt": "a" * 9000}, 413, "prompt: 9000 tokens: this server takes at most 8192"),
        ({"prompt": "a" * 200_000}, 413, "the request has more than 196608 bytes: shorten the prompt"),
    ],
)
def test_what_is_wrong_is_said_in_openais_form(run: Path, body: Any, status: int, message: str) -> None:
    found, answer = asked(run, body)
    assert (found, answer["error"]["type"]) == (status, "invalid_request_error")
    assert answer["error"]["message"].startswith(message)


def test_null_is_as_if_left_out(run: Path) -> None:
    how = {"prompt": "ab", "max_tokens": 9, "seed": 3}
    nothing = ("temperature", "top_p", "top_k", "stop", "stream", "stream_options", "n", "logprobs", "user")
    (status, bare), (found, full) = asked(run, how), asked(run, how | dict.fromkeys(nothing))
    assert (status, found) == (200, 200)
    assert full["choices"] == bare["choices"]


def test_other_pages_and_models_of_other_kinds_are_told_apart(run: Path) -> None:
    status, answer = asked(run, {"messages": []}, "/v1/chat/completions")
    assert (status, answer["error"]["message"]) == (
        404, f"{NAME} was not trained on conversations (data=chat): use /v1/completions"
    )  # fmt: skip
    assert asked(run, {}, "/v1/edits")[0] == 404
    app = TestClient(app_of(served_for(run)))
    assert app.get("/v1/completions").status_code == 405
    assert app.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 400
    page = app.get("/")
    assert "<textarea" in page.text
    assert "http" not in page.text  # nothing from elsewhere


def test_a_key_is_asked_for_where_one_is_set(run: Path) -> None:
    app = TestClient(app_of(served_for(run, key="s3cret")))
    body = {"model": NAME, "prompt": "ab", "max_tokens": 1}
    for header in (None, b"Bearer other", "Bearer é".encode("latin-1")):
        answer = app.post("/v1/completions", json=body, headers={b"Authorization": header} if header else None)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert app.get("/v1/models").status_code == 401
    assert app.get("/health").status_code == 200
    assert app.post("/v1/completions", json=body, headers={"Authorization": "Bearer s3cret"}).status_code == 200


def test_a_text_ends_before_a_stop_even_if_it_comes_in_pieces(run: Path) -> None:
    how = {"prompt": "ab", "max_tokens": 40, "temperature": 20, "seed": 5}
    _, all_of_it = asked(run, how)
    text = all_of_it["choices"][0]["text"]
    stop = text[10:13]
    status, answer = asked(run, {**how, "stop": ["zzzz", stop]})
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "stop")
    assert answer["choices"][0]["text"] == text[: text.index(stop)]
    stops = Stops(["abc"])
    assert [stops.pass_on(piece, False) for piece in ("xa", "b", "b", "ab")] == [
        ("x", False), ("", False), ("abb", False), ("", False),
    ]  # fmt: skip
    assert stops.pass_on("", True) == ("ab", False)


def test_a_full_queue_a_client_that_leaves_and_one_that_waits_too_long(run: Path) -> None:
    served = served_for(run, "--queue", "0", "--tokens", str(LONG))
    with serving(served) as address:
        client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        # 1. a stream that is read to its third piece: meanwhile nobody else gets in
        stream = client.completions.create(model=NAME, prompt="ab", max_tokens=LONG, stream=True, temperature=20)
        for _ in range(3):
            next(stream)
        with pytest.raises(APIStatusError) as raised:
            client.completions.create(model=NAME, prompt="ab")
        assert raised.value.status_code == 429
        assert raised.value.response.headers["Retry-After"] == "1"
        stream.close()
        wait_until(lambda: served.worker.running is None, "the generation ends when its client has left")
        # 2. the same of a whole answer
        where = urlsplit(address)
        connection = http.client.HTTPConnection(where.hostname or "", where.port)
        body = json.dumps({"model": NAME, "prompt": "ab", "max_tokens": LONG})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        wait_until(lambda: served.worker.running is not None, "it is generated")
        connection.close()
        wait_until(lambda: served.worker.running is None, "the generation ends when its client has left")
        assert client.completions.create(model=NAME, prompt="ab").usage is not None


def test_a_request_ends_after_its_seconds_and_when_the_server_is_drained(run: Path) -> None:
    served = served_for(run, most_tokens=LONG, seconds=3)
    with serving(served) as address:
        client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(model=NAME, prompt="ab", max_tokens=LONG, stream=True)
        with pytest.raises(APIError, match="was not complete within"):
            list(stream)
        with pytest.raises(APIStatusError) as raised:
            client.completions.create(model=NAME, prompt="ab", max_tokens=LONG)
        assert (raised.value.status_code, raised.value.code) == (503, "timeout")
        served.worker.draining = True
        with pytest.raises(APIStatusError) as raised:
            client.completions.create(model=NAME, prompt="ab")
        assert raised.value.status_code == 503
    assert TestClient(app_of(served)).get("/health").status_code == 503


def test_a_model_of_conversations_answers_one(tmp_path: Path) -> None:
    run = trained(tmp_path, data={"kind": "chat"})
    with serving(served_for(run)) as address:
        client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        how: dict[str, Any] = {"model": NAME, "max_tokens": 40, "temperature": 20, "seed": 2}
        done = client.chat.completions.create(messages=[{"role": "user", "content": "ab"}], **how)
        chunks = list(client.chat.completions.create(messages=[{"role": "user", "content": "ab"}], stream=True, **how))
        prompt = "User: ab\nAssistant:"
        plain = client.completions.create(prompt=prompt, **how).choices[0]
        assert (done.choices[0].message.content, done.choices[0].finish_reason) == (
            plain.text.removeprefix(" "),
            plain.finish_reason,
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == done.choices[0].message.content
        assert "\n" not in (done.choices[0].message.content or "")  # a line feed ends an answer
    body = {"messages": [{"role": "tool", "content": "ab"}]}
    status, answer = asked(run, body, "/v1/chat/completions")
    assert status == 400
    assert (
        answer["error"]["message"] == "messages: a message needs a role (system, user, assistant) and a text as content"
    )


def test_a_conversation_is_spelled_as_in_training() -> None:
    vocabulary = bpe_kit.small()
    messages = [("user", "the"), ("assistant", "a"), ("user", "b")]
    question, label, answer, again = map(vocabulary.encode, ("User: the\n", "Assistant:", " a", "User: b\n"))
    expected = [*question, *label, *answer, vocabulary.end_of_text, *again, *label]
    prompt = prompt_of([{"role": role, "content": text} for role, text in messages], vocabulary)
    assert prompt == expected


def test_a_text_ends_with_the_token_that_means_it(tmp_path: Path) -> None:
    vocabulary = bpe_kit.small()
    run = trained(tmp_path, vocabulary.to_json(), vocabulary.size)
    served = served_for(run)
    assert served.ends == vocabulary.end_of_text
    how = {"prompt": "the", "max_tokens": 50, "temperature": 20, "seed": 1}
    _, whole = asked(run, how, ends=None)
    ids = vocabulary.encode(whole["choices"][0]["text"])
    _, cut = asked(run, how, ends=ids[-1])
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert whole["choices"][0]["text"].startswith(cut["choices"][0]["text"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--queue", "-1", "--tokens", "0"], "2 problems:\n  1. --queue -1: at least 0\n  2. --tokens 0: at least 1"),
        (["--seconds", "nan"], "--seconds nan: a number above 0"),
        (["--host", "192.0.2.1"], "--host 192.0.2.1 --port 8000: Cannot assign requested address"),
        (["--host", "127..0.0.1"], "--host 127..0.0.1 --port 8000: Name or service not known: choose another"),
        (["--step", "7"], "/snapshots: no snapshot of step 7; there are 1"),
    ],
)
def test_bad_options_exit_64(run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(run), *arguments]) == 64
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("key", ["", "two words", "a\n", "schlüssel"])
def test_a_key_that_no_header_carries_is_refused_and_not_shown(
    run: Path, key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINGPT_SERVE_KEY", key)
    assert command.main([str(run), "--host", "192.0.2.1"]) == 64
    assert capsys.readouterr().err == (
        "error: MINGPT_SERVE_KEY in the environment: a key is ASCII letters, digits and marks, without spaces: set "
        "one, or unset it\n"
    )


def test_a_missing_package_is_named_with_its_extra(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert command.main([str(run)]) == 64
    assert capsys.readouterr().err.startswith("error: mingpt serve needs starlette and uvicorn: pip install")


@pytest.mark.slow
def test_sigterm_ends_what_is_generated_within_the_limit(run: Path, tmp_path: Path) -> None:
    limits = ("--port", "0", "--tokens", str(LONG), "--drain", "1")
    server = Node([sys.executable, "-m", "mingpt.serve", str(run), *limits], {"PYTHONPATH": str(ROOT)}, tmp_path)
    wait_until(lambda: "serving at " in server.output, "the server listens")
    (address,) = re.findall(r"serving at (\S+) \(Ctrl-C ends it\)", server.output)
    client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    stream = client.completions.create(model=NAME, prompt="ab", max_tokens=LONG, stream=True)
    next(stream)
    server.process.send_signal(signal.SIGTERM)
    with pytest.raises(APIError, match="the server was stopped, and this took longer than 1 s"):
        list(stream)
    assert server.wait() == 0, server.output
    assert "Traceback" not in server.output
    server.assert_nothing_left()
