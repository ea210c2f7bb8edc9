"""Commands of the shell, called in this process as a world of one; their process group is closed afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager

from bitkv_dist.parallel import mesh as meshes


@contextmanager
def closing_mesh() -> Iterator[None]:
    try:
        yield
    finally:
        if meshes.current() is not None:
            meshes.current().close()


def call(command, *argv: object) -> None:
    """It must succeed."""
    with closing_mesh():
        assert command.main(list(map(str, argv))) == 0


def refused(command, capsys, *argv: str) -> str:
    """The one line that `argv` is refused with: from argparse, or as the ValueError that the shell prints."""
    with closing_mesh():
        try:
            command.main(list(argv))
        except ValueError as error:
            message = str(error)
        except SystemExit as leaving:
            assert leaving.code == 2
            message = capsys.readouterr().err.strip()
    assert "\n" not in message
    return message
