"""Secrets go into every source of text at once; what leaves the process through every sink is searched for them."""

import json
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

import pytest
from torch import Tensor

from mingpt.cli import redact
from mingpt.cli.command import code_of
from mingpt.cli.console import complain, printable, say, say_json
from mingpt.cli.redact import is_secret, redacted, without_secrets
from mingpt.compose import compose
from mingpt.config import plugin
from mingpt.config.section import Own
from mingpt.data.own import Rows
from mingpt.data.source import Source
from mingpt.errors import CRASHED, USER_ERROR, TransientError, UserError
from mingpt.observe.events import AttemptFailed, Event, Observers, SnapshotLost
from mingpt.observe.notify import Alarms
from mingpt.preflight.places import write
from mingpt.snapshot.manifest import CANONICAL
from mingpt.train.attempt import attempt, report_failure
from mingpt.world.lifetime import Lifetime
from tests.kits.hook_kit import hook
from tests.kits.own_kit import rows
from tests.kits.paths_kit import ROOT
from tests.kits.verb_kit import mingpt

CANARY = "cAnArY7f3a9c55"
NUMBER = "918273645546"
HIDDEN = "unguessable-91827"  # nothing but the variable's name tells that it is a secret
URL = f"https://user:{CANARY}@127.0.0.1:9/a.txt?sig={CANARY}"
URLS = (
    f"https://user:{CANARY}@127.0.0.1:9/a.txt",
    f"https://user:{CANARY}/x@127.0.0.1:9/a.txt",
    f"https://{CANARY}@127.0.0.1:9/a.txt",
    f"https://127.0.0.1:9/a.txt?sig={CANARY}",
    f"https://127.0.0.1:9/a.txt#token={CANARY}",
    f"s3://user:{CANARY}@bucket/a.txt",
    f"simplecache::https://user:{CANARY}@127.0.0.1:9/a.txt",
)
NAMED = (
    "token", "hf_token", "api_key", "apiKey", "secret", "client_secret", "password", "key", "connection_string",
    "AccountKey", "credentials",
)  # fmt: skip
# What an error's text may hold: each form of a secret, and words after it that have to stay.
TEXT = f"can't read {URL}: Bearer {HIDDEN} is refused, with api_key={CANARY}, {{'token': '{CANARY}'}}: look at it"
STAYS = ("can't read https://***@127.0.0.1:9/a.txt?***: Bearer *** is refused, with api_key=***", "look at it")


@pytest.fixture(autouse=True)
def secret_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STORE_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "TRACKER_PASSWORD"):
        monkeypatch.setenv(name, HIDDEN)


@pytest.fixture
def output(capfd: pytest.CaptureFixture[str]) -> Callable[[], str]:
    return lambda: "".join(capfd.readouterr())


def clean(text: str) -> str:
    for secret in (CANARY, NUMBER, HIDDEN):
        assert secret not in text
    return text


def clean_folder(folder: Path) -> None:
    for path in folder.rglob("*"):
        clean(str(path.relative_to(folder)))
        if path.is_file():
            clean(path.read_bytes().decode(errors="replace"))


def with_text(text: str) -> str:
    for part in STAYS:
        assert part in text
    return clean(text)


def everywhere() -> list[str]:
    """Overrides with the secret in each form."""
    urls = ",".join(f"'{url}'" for url in URLS)
    return [
        f"+data.urls=[{urls}]",
        f"+data.url='{URLS[1]}'",
        f"+data.nested={{hf_token: {CANARY}, inner: {{password: {NUMBER}, places: [{urls}]}}}}",
        *(f"+data.{name}={CANARY}" for name in NAMED),
        "+data.plain=${oc.env:STORE_TOKEN}",
        "+data.auth='Bearer ${oc.env:STORE_TOKEN}'",
        f"+data.text='{{api_key: {CANARY}}}'".replace("api_key: ", "api_key="),
    ]


# --- what is told ---


SENTENCES = [
    # A URL ends where the sentence goes on.
    ("http://h/a?sig=x: not there: look", "http://h/a?***: not there: look"),
    ("(http://h/a?sig=x), and (s3://b/c)", "(http://h/a?***), and (s3://b/c)"),
    ("'http://h/a b?sig=x' seed=2", "'http://h/a b?sig=***' seed=2"),
    ("is http://h/a the right one? see docs", "is http://h/a the right one? see docs"),
    ("http://h/a#part then http://h/b?x.", "http://h/a#*** then http://h/b?***."),
    # A token of a known form, without any name.
    ("the token is hf_abcdefgh123", "the token is ***"),
    # No value is no secret, and what names only look like one stays.
    ("health.notify=null data.tokens=bpe keep=2", "health.notify=null data.tokens=bpe keep=2"),
    ("health.notify=http://h/x data.token=abc", "health.notify=*** data.token=***"),
    ("data.token=abc: unknown; (password=x)", "data.token=***: unknown; (password=***)"),
    ("\"data.token='a b'\" is none", "\"data.token='***'\" is none"),
    (repr("it's data.token='a b c' \"x\""), repr("it's data.token='***' \"x\"").replace("***\\", "***")),
    (json.dumps({"hf_token": "a b", "n": 1}), '{"hf_token": "***", "n": 1}'),
    (shlex.join(["data.token='a b'", "seed=2"]), shlex.join(["data.token='***'", "seed=2"])),
    ("a secret: give '${oc.env:NAME}'", "a secret: give '${oc.env:NAME}'"),
    # What an error shows of a value: Python's own form of it, which may hold quotes, and lists and dicts.
    ('health.notify="it\'s x": unknown', 'health.notify="***": unknown'),
    ("data.token='it is \"x\"': unknown", "data.token='***': unknown"),
    (f"data.token={'x y' + chr(39) + chr(34) + ' z'!r}: unknown", "data.token='***': unknown"),
    ("data.token=['a b', ['c']]: must be a text", "data.token=***: must be a text"),
    ("data.token={'a': {'b': 'x'}}: must be a text", "data.token=***: must be a text"),
    ("failed with (n=1, data.key='x y')", "failed with (n=1, data.key='***')"),
    (
        "(more={'myKey': 'x', 'key': 'x y', 'n': 1, 'my_password': 5})",
        "(more={'myKey': '***', 'key': '***', 'n': 1, 'my_password': ***})",
    ),
    ("{a: {b: 1}, hf_token: abc, key: 'd e'}", "{a: {b: 1}, hf_token: ***, key: '***'}"),
    # A list ends with the bracket that closes it; one that nothing closes, or is nested deeper, with the line's last.
    (
        "api_key=[abc] is wrong: give api_key=… (see docs/observe.md)",
        "api_key=*** is wrong: give api_key=*** (see docs/observe.md)",
    ),
    ("a_token=['x]', {'b': (1, \"}\")}], then [see] (docs)", "a_token=***, then [see] (docs)"),
    ("(n=1, more={'a_token': ['x', ']']}, z=[1])", "(n=1, more={'a_token': ***}, z=[1])"),
    ("password=(a)b)c: see (docs)", "password=***: see (docs)"),
    ("password=[it's x y] z] w", "password=*** w"),
    ("password=[[[[[[a] b] c] d] e] f] g", "password=*** g"),
    ("runs/a@1200 and s3://bucket/run@1200", "runs/a@1200 and s3://bucket/run@1200"),
]


@pytest.mark.parametrize(("text", "shown"), SENTENCES)
def test_a_sentence_stays_around_its_secret(text: str, shown: str) -> None:
    assert redacted(text) == shown
    assert redacted(shown) == shown


def test_a_secret_of_a_config_file_that_is_folded(tmp_path: Path, output: Callable[[], str]) -> None:
    folder = tmp_path / "experiment"
    folder.mkdir()
    data = f"data: {{my_password: '{'many words ' * 20}{NUMBER}', after: 5}}"
    (folder / "mine.yaml").write_text(f"# @package _global_\ndefaults: [classifier]\n{data}\n")
    assert compose.printing(["--cfg", "job", "-cd", str(tmp_path), "experiment=mine"]) == 0
    text = output()
    assert "  my_password: '***'\n  after: 5\n" in text
    clean(text)


SLIPS = [
    *(f"train data.cache_dir=cache {slip}" for slip in (
        "data={}", "'data={}'", "seed={}", "run.name={}", "data.tokens={}", "data.tokens='{}'", "seed='{}'",
        "model='{}'", "run='{}'", "data.workers='{}'", "reduce='{}'", "{}", "{}=5", "+data.nope='{}'", "data.path='{}'",
        "data.path='{}' data.tokens=bpe data.tokenizer='{}'", "data=gpt2 data.path=x data.tokenizer='{}'",
        "model=gpt2 model.init_from='{}' model.n_head=5",
        "--data.path={}", "--cfg={}", "--token {}", "--{}",
        "data=own data._target_='{}'", "optimizer.lr=${{oc.decode:'{}'}}", "train.freeze=['{}']",
    )),
    *(f"snapshots {command} {{}}" for command in ("list", "verify", "prune", "export {}")),
    "snapshots --{}", "snapshots show {} --nope={}", "prepare {} --out here --tokenizer {}", "generate {}",
    "launch --dry-run nope={}",
]  # fmt: skip


# The first URL is no valid address, because of the slash in its password; a client is asked for the second one.
SLIPPED = {"invalid": f"{URLS[1]}?sig={CANARY}", "asked": URLS[3]}
PLACES = re.compile("path=|init_from|tokenizer|^snapshots|^generate")


@pytest.mark.parametrize(
    ("slip", "url"), [(slip, url) for slip in SLIPS for url in SLIPPED if url == "invalid" or PLACES.search(slip)]
)
def test_no_slip_is_told_with_its_secret(
    slip: str, url: str, output: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One word of the shell each; Hydra reads the quotes inside."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINGPT_STORE_SECONDS", "1")
    assert mingpt.ends(slip.format(*[SLIPPED[url]] * 2)) != 0
    assert clean(mingpt.out + mingpt.err + output()) != ""
    clean_folder(tmp_path)


@pytest.mark.parametrize("form", ["{}={}", "+data.{}={}", "--{}={}"])
def test_no_slip_tells_what_its_name_says_is_secret(form: str, output: Callable[[], str]) -> None:
    for name in NAMED:
        with pytest.raises((SystemExit, UserError)) as error:
            compose.configure([form.format(name, CANARY)])
        say(str(error.value))
        clean(output())


@pytest.mark.parametrize(
    "mistake",
    [
        *(f"health.notify={value}" for value in (f"[{CANARY}]", f"[[{CANARY}]]", f"{{a: {CANARY}}}")),
        *(f"observers={{{name}: {CANARY}}}" for name in NAMED),
    ],
)
def test_no_wrong_value_is_told_with_its_secret(mistake: str, output: Callable[[], str]) -> None:
    """The error has the value as Python writes it; what prints the error takes the secret out."""
    with pytest.raises(UserError) as error:
        compose.configure([mistake])
    assert CANARY in str(error.value)
    say(str(error.value))
    clean(output())


@pytest.mark.parametrize("value", [CANARY, f"[{CANARY}]", f"{{a: [{CANARY}]}}", f"{CANARY} x", f"'it\\'s {CANARY}'"])
def test_code_of_ones_own_fails_without_its_secrets(value: str, output: Callable[[], str]) -> None:
    for name in NAMED:
        for key in (f"+model.{name}={value}", f"+model.more={{n: {{{name}: {value}}}}}"):
            config = compose.configure(["experiment=classifier", "model._target_=tests.kits.own_kit.takes_all", key])
            assert isinstance(config.model, Own)
            with pytest.raises(UserError) as error:
                plugin.call("model", config.model)
            assert CANARY in str(error.value)
            say(str(error.value))
            clean(output())


def test_preflight_tells_no_secret(output: Callable[[], str]) -> None:
    for url in URLS:
        with pytest.raises((UserError, TransientError)) as failed:
            write([("run.dir", url)], "me", url)
        say(str(failed.value))
        clean(output())


def test_names_of_keys() -> None:
    for name in ("tokens", "tokenizer", "monkey", "keep", "keys", "token_count", "n_tokens"):
        assert not is_secret(name, "x")
    assert not is_secret("pad_token", 50256)
    assert is_secret("password", 1234)
    assert without_secrets("write key='a=b', or key=value") == "write key='a=b', or key=value"


def test_one_filter_stands_before_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\033]0;title\007\033[2J\r\u202e\x9b31m"
    for tell in (say, complain):
        tell(f"two\n\tlines {evil}")
    told = "two\n\tlines \\x1b]0;title\\x07\\x1b[2J\\r\\u202e\\x9b31m\n"
    assert capsys.readouterr() == (told, told)
    assert printable("a\nfinished: step 3") == "a\\nfinished: step 3"
    assert printable("漢 é – 'x'") == "漢 é – 'x'"


def test_the_length_from_which_a_variable_is_blanked_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for page in ("docs/snapshots.md", "SECURITY.md"):
        assert f"{redact.SHORTEST} characters or more" in " ".join((ROOT / page).read_text().split())
    value = "hunter22"
    assert len(value) == redact.SHORTEST
    monkeypatch.setenv("DB_PASSWORD", value)
    assert redact.without_secrets(f"in {value}") == "in ***"
    monkeypatch.setenv("DB_PASSWORD", value[:-1])
    assert redact.without_secrets(f"in {value}") == f"in {value}"


# --- where it leaves the process ---


def test_the_console(capsys: pytest.CaptureFixture[str]) -> None:
    say(TEXT)
    complain(TEXT)
    out, err = capsys.readouterr()
    assert with_text(out) == with_text(err)
    say_json({"why": [TEXT], URL: 1, "attention.key": "stays", "loss": float("nan")})
    out = capsys.readouterr().out
    document = json.loads(clean(out))
    with_text(document["why"][0])
    assert [*document.values()][2:] == ["stays", None]


@pytest.mark.parametrize("kind", [UserError, TransientError, ValueError])
def test_an_error_that_ends_a_command_and_the_file_that_torchrun_reads(
    kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A ValueError is a bug of ours: its stack trace is printed."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))

    def act() -> int:
        try:
            raise kind(TEXT) from OSError(URL)
        except kind as error:
            report_failure(error, Lifetime())
            with_text(capsys.readouterr().err)
            raise

    assert code_of(act) == (USER_ERROR if kind is UserError else CRASHED)
    err = capsys.readouterr().err
    with_text(err)
    assert ("Traceback" in err) == (kind is ValueError)
    with_text(path.read_text())


def test_the_command_that_launch_shows(tmp_path: Path, text: Path) -> None:
    shown = mingpt(
        "launch --dry-run", f"data.path={text}", f"run.dir={tmp_path}/run", f"health.notify='{URL}'",
        f"snapshot.dir='memory://user:{CANARY}@bucket/x'", "run.name='${oc.env:STORE_TOKEN}'",
    )  # fmt: skip
    assert "health.notify='\"'\"'***" in clean(shown)


@dataclass
class Seen:
    events: list[Event] = field(default_factory=list)

    def on(self, event: Event) -> None:
        self.events.append(event)


@pytest.mark.parametrize("event", [SnapshotLost(1, 1, TEXT), AttemptFailed(1, USER_ERROR, "UserError", TEXT)])
def test_what_observers_get_and_what_a_webhook_is_sent(event: SnapshotLost | AttemptFailed) -> None:
    said, seen = list[str](), Seen()
    with hook() as there:
        alarms = Alarms(there.url, "run", 1, said.append)
        Observers([seen, alarms], said.append).publish(event)
        alarms.post("hang", 1, TEXT)  # as a launcher does, without an event
        alarms.close()
    for body in there.bodies():
        with_text(body["text"])
    [got] = seen.events
    assert isinstance(got, (SnapshotLost, AttemptFailed))
    with_text(got.reason)
    assert said == []


class Failing:
    """An own observer that tells what it knows."""

    def __init__(self, **_: object) -> None:
        pass

    def on(self, event: Event) -> None:
        raise OSError(TEXT)


class Unreadable(Rows):
    """Rows that can't be read any more at some microbatch, after the first snapshot."""

    left = 24

    def __getitem__(self, ids: Sequence[int]) -> Sequence[Tensor]:  # type: ignore[override]
        self.left -= 1
        if self.left == 0:
            raise OSError(TEXT)
        return super().__getitem__(ids)


def unreadable(micro_size: int, **_: object) -> Source:
    source = rows(n_in=10, count=64, micro_size=micro_size)
    assert isinstance(source.train, Rows)
    return replace(source, train=Unreadable(*source.train.tensors))


RUN = (
    "experiment=classifier", "~data.n_in", "~data.count", "train.max_steps=4", "train.log_every=1",
    "snapshot.every_steps=2", "snapshot.hot_every_steps=2", "snapshot.asynchronous=false",
    "observers=[{_target_: test_secrets.Failing}]", "track=[tensorboard]",
)  # fmt: skip


def test_a_run_and_its_files(
    tmp_path: Path, output: Callable[[], str], monkeypatch: pytest.MonkeyPatch, outlived: None
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    (tmp_path / "hot").mkdir()
    with hook() as there:
        places = (
            f"run.dir={tmp_path}/run",
            f"snapshot.hot_dir={tmp_path}/hot",
            f"health.notify='{there.url}?{CANARY}'",
        )
        arguments = [*RUN, *places, *everywhere(), "data._target_=tests.kits.own_kit.rows_from_anywhere"]
        assert CANARY in str(compose.configure(arguments).model_dump())  # the code that they are for gets them
        for printed in ("--cfg job", "--cfg job --resolve", "--cfg all", "--info all", "--hydra-help"):
            assert compose.printing([*printed.split(), *arguments]) == 0
        assert attempt([*arguments, "data._target_=test_secrets.unreadable"], Lifetime()) == CRASHED
        # A second start: refused for other settings, then allowed, so that both values are told and kept.
        changed = (f"+data.another=['{URL}']", f"+data.third_token={CANARY}", "seed=2")
        assert attempt([*arguments, *changed], Lifetime()) == USER_ERROR
        assert attempt([*arguments, *changed, "resume.changed=true"], Lifetime()) == 0
        assert attempt([*arguments, f"run.dir='{URLS[1]}'"], Lifetime()) == USER_ERROR
        posts = [body for _, body in there.posts]
    assert [body["event"] for body in posts] == ["finished"]
    with_text(output())
    clean(json.dumps(posts))
    clean_folder(tmp_path)
    written = {path.relative_to(tmp_path).parts[1] for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert {"config.yaml", "attempts", "ledger", "metrics", "snapshots", "trace"} <= written
    assert any(name.startswith("events.out.tfevents.") for name in written)
    assert "failed: " in (tmp_path / "run/ledger").glob("*").__next__().read_text()
    assert "***" in (tmp_path / "run/config.yaml").read_text()


VERBS = (
    "snapshots list RUN", "snapshots show RUN", "snapshots show RUN --json", "snapshots verify RUN", "log RUN",
    "log RUN --json", "log RUN --graph", "report RUN --out TMP/page.html", "report TMP --out TMP/table.html",
    "diff RUN RUN@8", "diff RUN RUN@8 --json", "export RUN TMP/exported", "replay RUN@12 --json",
    "replay RUN@12 --out TMP/again", "fork RUN@8 TMP/fork", "evaluate RUN", "generate RUN --tokens 2",
)  # fmt: skip


def test_a_run_of_a_stranger(tmp_path: Path, trained: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    hidden = {"hf_token": CANARY, "myKey": CANARY, "url": URL, "places": [URL, {"password": CANARY}]}
    for path in run.glob("snapshots/*/manifest.json"):
        manifest = json.loads(path.read_text())
        manifest["config"]["train"] |= hidden
        manifest["history"][-1]["changes"] = {"data.path": [URL, "t.txt"]}
        # As a stranger's program writes it: this one would blank it.
        del manifest["checksum"]
        manifest["checksum"] = sha256(CANONICAL.encode(manifest).encode()).hexdigest()
        path.write_text(CANONICAL.encode(manifest))
    other = tmp_path / "other"  # a table of both has the settings in which they differ
    shutil.copytree(run, other)
    for folder, token in ((run, CANARY), (other, f"{CANARY}-2")):
        config = folder / "config.yaml"
        config.write_text(f"{config.read_text()}\nmore: {{hf_token: {token}, url: '{URL}'}}\n")
    for metrics in run.glob("metrics/*"):
        with metrics.open("a") as file:
            file.write(json.dumps({"step": 12, "sample": f"see {URL}"}) + "\n")
    ended = list[int]()
    for words in VERBS:
        ended.append(mingpt.ends(words.replace("RUN", str(run)).replace("TMP", str(tmp_path))))
        assert clean(mingpt.out) + clean(mingpt.err), words
    assert ended.count(0) > len(VERBS) / 2, ended
    shutil.rmtree(run)
    shutil.rmtree(other)
    clean_folder(tmp_path)
