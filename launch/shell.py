"""What every launch script shares: flags that fail in one line, and an end that is one clear message and no hang.

Exit status: 0 fine, 1 something broke, 2 bad input, 130 interrupted, 141 the reader of stdout went away.
Only the standard library is imported here, so that --help and bad flags answer at once.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

INTERRUPTED, BROKEN_PIPE = 130, 141
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_OTHERS_SPEAK_S = 3.0  # before there is a mesh: time for rank 0 to say it, and for the launcher to end this rank


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line and exit status 2. --local_rank is taken and ignored: the environment wins."""

    def __init__(self, name: str, description: str):
        super().__init__(prog=f"bitkv {name}", description=description, allow_abbrev=False)
        self.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
        self.add_argument("--debug", action="store_true", help="print the traceback of a failure (so does BITKV_DEBUG=1)")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {_one_line(message)}; see --help\n")

    def _print_message(self, message: str, file=None) -> None:
        if launched_rank() == 0:  # all ranks have the same command line
            super()._print_message(message, file)


def run(main: Callable[[list[str]], int | None], name: str, argv: list[str] | None = None) -> NoReturn:
    """Call `main(argv)` and end the process with its status, without waiting for destructors or for dead peers."""
    argv = sys.argv[1:] if argv is None else argv
    _leave_source_folder()
    try:
        status = main(argv) or 0
        sys.stdout.flush()
        mesh = _mesh()
        if mesh is not None:
            mesh.close()
    except SystemExit as leaving:
        status = _leave(leaving.code)
    except BaseException as error:
        status = _fail(error, name, debug="--debug" in argv or bool(os.environ.get("BITKV_DEBUG")))
    _exit(status)


def say(message: str) -> None:
    """One line on stderr, whole even when several ranks write."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def output_file(text: str) -> Path:
    """argparse type of a file to write: refused at once, not after the work, when its folder is not there."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: must be a file in an existing folder")
    return path


def launched_rank() -> int:
    """This process's rank by the launcher's variables, before anything heavy is imported; 0 without a launcher."""
    value = next((os.environ[name] for name in _RANKS if name in os.environ), "0")
    return int(value) if value.isdecimal() else 0


def _leave(code: int | str | None) -> int:
    """sys.exit from inside: of --help, of a flag that is wrong, or after a mesh was started, where the others must go too."""
    status = code if isinstance(code, int) else int(code is not None)
    mesh = _mesh()
    first = mesh is None or mesh.fail(f"exit status {status}", status)
    if isinstance(code, str) and first:
        say(code)
    if mesh is not None:
        mesh.linger()
    return status


def _fail(error: BaseException, name: str, debug: bool) -> int:
    """Report `error` once for the whole job and return the exit status."""
    status, message = _describe(error, name)
    mesh = _mesh()
    if mesh is None:
        # Others may be failing in the same way: rank 0 speaks for all, and the launcher then ends the others as they wait.
        time.sleep(0 if launched_rank() == 0 else _OTHERS_SPEAK_S)
        mine = True
    else:
        from bitkv_dist.parallel.alarm import lost_peer

        if why := lost_peer(error):  # a rank that fails raises the alarm before it goes, so then `fail` tells us to be quiet
            message = f"{_who()}: lost another rank without a word from it, perhaps killed or out of memory ({why})"
        mine = mesh.fail(message, status)
    if mine and message:
        say(message)
    if debug and not isinstance(error, KeyboardInterrupt):
        traceback.print_exception(error)
    if mesh is not None:
        mesh.linger()
    return status


def _describe(error: BaseException, name: str) -> tuple[int, str]:
    """(exit status, what to print; nothing where the user knows already)."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, ""
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE, ""
    if isinstance(error, ValueError):
        return 2, f"bitkv {name}: {_one_line(error)}"
    return 1, f"{_who()}: {type(error).__name__}: {_one_line(error)}"


def _who() -> str:
    size = next((os.environ[name] for name in _SIZES if name in os.environ), "1")
    return f"bitkv: rank {launched_rank()} of {size} (host {socket.gethostname()})"


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


def _mesh():
    """The started mesh, without importing torch only to learn that there is none."""
    module = sys.modules.get("bitkv_dist.parallel.mesh")
    return module.current() if module else None


def _leave_source_folder() -> None:
    """Forget this folder and the repository's root as places to import from.

    `python launch/x.py` puts launch/ first: its evaluate.py would hide the package of that name, and the root's kernels/ the
    one that transformers looks for. In an installed copy neither is on the path.
    """
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() not in (here, here.parent)]


def _exit(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = status or BROKEN_PIPE
    os._exit(status)
