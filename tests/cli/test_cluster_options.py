"""Goal: `tandem cluster` asks the server that is named, wherever on the line that is done."""

import pytest
import typer

from tandem.cli.clusters import instances
from tandem.cli.clusters.app import app
from tandem.cli.main import UsageError


@pytest.fixture
def asked(monkeypatch):
    """The calls of a server that commands make: address, action, key."""
    calls = []

    def call(url, path, kind, *, body, api_key, timeout_s):
        calls.append((url, None if body is None else body["action"], api_key))
        return kind(instances=[])

    monkeypatch.setattr(instances, "call_server", call)
    return calls


def run(line):
    typer.main.get_command(app)(line.split(), standalone_mode=False)


def test_options_before_a_command_are_those_of_the_command(asked):
    for line in ("", "list", "drain a", "undrain a", "remove a", "restart", "add", "role a decode"):
        run(f"--url http://b:1 --api-key k {line}")
        run(f"--url http://a:1 {line or 'list'} --url http://b:1 --api-key k")
    assert {(url, key) for url, _, key in asked} == {("http://b:1", "k")}
    assert [action for _, action, _ in asked[4:6]] == ["drain"] * 2


def test_options_that_a_command_does_not_have_are_refused(asked, capsys):
    with pytest.raises(UsageError, match="asks no server and has no --url"):
        run("--url http://b:1 keys secret")
    run("--json list")
    assert capsys.readouterr().out.strip() in ('{"instances":[]}', '{\n  "instances": []\n}')
    assert len(asked) == 1
