"""A secret is put into every place that a user could put one into, and searched for in all that is written."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mingpt.cli import cli, redact
from mingpt.cli.console import complain, printable, say
from mingpt.cli.redact import is_secret, without_secrets
from mingpt.compose import compose
from mingpt.config import plugin
from mingpt.config.section import Own
from mingpt.errors import USER_ERROR, TransientError, UserError
from mingpt.preflight.places import write
from mingpt.train.attempt import attempt
from mingpt.world.lifetime import Lifetime
from tests.kits.paths_kit import ROOT
from tests.kits.verb_kit import mingpt

CANARY = "cAnArY7f3a9c55"
NUMBER = "918273645546"
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
OWN = ("experiment=classifier", "data._target_=tests.kits.own_kit.rows_from_anywhere", "~data.n_in", "~data.count")


def nowhere(written: str, folder: Path | None = None) -> None:
    for secret in (CANARY, NUMBER):
        assert secret not in written
        for path in folder.rglob("*") if folder else ():
            assert secret not in str(path.relative_to(folder))  # type: ignore[arg-type]
            assert not path.is_file() or secret.encode() not in path.read_bytes(), path


@pytest.fixture
def output(capfd: pytest.CaptureFixture[str]) -> Callable[[], str]:
    return lambda: "".join(capfd.readouterr())


def everywhere() -> list[str]:
    """Overrides with the secret in each form."""
    urls = ",".join(f"'{url}'" for url in URLS)
    return [
        f"+data.urls=[{urls}]",
        f"+data.url='{URLS[1]}'",
        f"+data.nested={{hf_token: {CANARY}, inner: {{password: {NUMBER}, places: [{urls}]}}}}",
        *(f"+data.{name}={CANARY}" for name in NAMED),
        "+data.plain=${oc.env:SOME_TOKEN}",
        "+data.auth='Bearer ${oc.env:SOME_TOKEN}'",
        f"+data.text='{{api_key: {CANARY}}}'".replace("api_key: ", "api_key="),
    ]


def test_a_run_writes_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: Callable[[], str]) -> None:
    monkeypatch.setenv("SOME_TOKEN", CANARY)
    (tmp_path / "hot").mkdir()
    places = (f"run.dir={tmp_path}/run", f"snapshot.hot_dir={tmp_path}/hot", "train.max_steps=4")
    small = ("snapshot.every_steps=2", "snapshot.hot_every_steps=2", "train.log_every=1")
    arguments = [*OWN, *places, *small, *everywhere()]
    config = compose.configure(arguments)
    assert CANARY in str(config.model_dump())  # the code that they are for gets them
    for printed in ("--cfg job", "--cfg job --resolve", "--cfg all", "--info all", "--hydra-help"):
        assert compose.printing([*printed.split(), *arguments]) == 0
    assert attempt(arguments, Lifetime()) == 0
    # A second start: refused for other settings, then allowed, so that both values are told and kept.
    changed = (f"+data.another=['{URLS[0]}']", f"+data.third_token={CANARY}", "seed=2")
    assert attempt([*arguments, *changed], Lifetime()) == USER_ERROR
    assert attempt([*arguments, *changed, "resume.changed=true", "train.max_steps=6"], Lifetime()) == 0
    assert attempt([*arguments, f"run.dir='{URLS[1]}'"], Lifetime()) == USER_ERROR
    for command in (["show"], ["show", "--json"], ["list"], ["verify"]):
        assert cli.run("snapshots", [*command, f"{tmp_path}/run"]) == 0
    text = output()
    assert "***" in text
    nowhere(text, tmp_path)


def test_a_secret_of_a_config_file_that_is_folded(tmp_path: Path, output: Callable[[], str]) -> None:
    folder = tmp_path / "experiment"
    folder.mkdir()
    data = f"data: {{my_password: '{'many words ' * 20}{NUMBER}', after: 5}}"
    (folder / "mine.yaml").write_text(f"# @package _global_\ndefaults: [classifier]\n{data}\n")
    assert compose.printing(["--cfg", "job", "-cd", str(tmp_path), "experiment=mine"]) == 0
    text = output()
    assert "  my_password: '***'\n  after: 5\n" in text
    nowhere(text)


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


@pytest.mark.parametrize("url", [URLS[1], URLS[3]])
@pytest.mark.parametrize("slip", SLIPS)
def test_no_slip_is_told_with_its_secret(
    slip: str, url: str, output: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One word of the shell each; Hydra reads the quotes inside."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINGPT_STORE_SECONDS", "1")
    assert mingpt.ends(slip.format(*[url] * 2)) != 0
    text = mingpt.out + mingpt.err + output()
    assert "***" in text
    nowhere(text, tmp_path)


@pytest.mark.parametrize("form", ["{}={}", "+data.{}={}", "--{}={}"])
def test_no_slip_tells_what_its_name_says_is_secret(form: str, output: Callable[[], str]) -> None:
    for name in NAMED:
        with pytest.raises((SystemExit, UserError)) as error:
            compose.configure([form.format(name, CANARY)])
        say(str(error.value))
        nowhere(output())


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
    nowhere(output())


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
            nowhere(output())


def test_preflight_tells_no_secret(output: Callable[[], str]) -> None:
    for url in URLS:
        with pytest.raises((UserError, TransientError)) as failed:
            write([("run.dir", url)], "me", url)
        say(str(failed.value))
        nowhere(output())


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
