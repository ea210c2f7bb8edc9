"""`bitkv COMMAND`: dispatch, help, version, and one line for a command that does not exist."""

import pytest

from bitkv_dist import __version__
from bitkv_dist.launch import cli


def test_help_lists_the_commands(capsys):
    assert cli.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n  {name} " in printed for name in cli.available())
    assert {"generate", "diagnose"} <= cli.available().keys()


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"bitkv {__version__}\n"


@pytest.mark.parametrize("argv", [[], ["generat"], ["--model", "x"], ["cli"], ["shell"]])
def test_wrong_command_is_one_line(argv, capsys):
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "generate" in captured.err


def test_dispatch_passes_the_flags_on(monkeypatch):
    from bitkv_dist.launch import diagnose

    started = []
    monkeypatch.setattr(cli.shell, "run", lambda *given: started.append(given))
    cli.main(["diagnose", "--tp", "2"])
    assert started == [(diagnose.main, "diagnose", ["--tp", "2"])]
