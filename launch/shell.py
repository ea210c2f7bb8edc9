"""What every launch script shares: flags that fail in one line, and an end that is one clear message and no hang.

Exit status: 0 fine, 1 something broke, 2 bad input, 130 interrupted, 141 the reader of stdout went away, 143 terminated.
Only the standard library is imported here, so that --help and bad flags answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

INTERRUPTED, BROKEN_PIPE, TERMINATED = 130, 141, 143
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_OTHERS_FAIL_S = 1.5  # how much later than the first a rank of the same host may meet the same error


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
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a peer that goes away is reported once, and not by its backtraces
    # Read when torch loads its OpenMP. By default torch's threads spin for milliseconds after an operation that they shared, on
    # the cores that the kernels which come next want; 0.1 ms bridges torch's own operations.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        status = _finish(_called(main, argv))
    except BaseException as error:
        status = _fail(error, name, debug="--debug" in argv or bool(os.environ.get("BITKV_DEBUG")))
    _exit(status)


def say(message: str) -> None:
    """One line on stderr, whole even when several ranks write."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def say_for_all(message: str, mine: bool | None) -> None:
    """`say` in the rank that is the one to report; where nobody can know (None), in one of each host."""
    with contextlib.ExitStack() as until_all_know:
        if _speaks_for_host(until_all_know) if mine is None else mine:
            say(message)


def output_file(text: str) -> Path:
    """argparse type of a file to write: refused at once, not after the work, when its folder is not there."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: must be a file in an existing folder")
    return path


def launched_rank() -> int:
    """This process's rank by the launcher's variables, before anything heavy is imported; 0 without a launcher."""
    return _first_number(_RANKS, 0)


def launched_size() -> int:
    return _first_number(_SIZES, 1)


def _first_number(names: tuple[str, ...], default: int) -> int:
    value = next((os.environ[name] for name in names if name in os.environ), "")
    return int(value) if value.isdecimal() else default


def _called(main: Callable[[list[str]], int | None], argv: list[str]) -> int:
    try:
        return main(argv) or 0
    except SystemExit as leaving:
        if leaving.code:
            raise
        return 0  # --help


def _finish(status: int) -> int:
    sys.stdout.flush()
    if mesh := _mesh():
        mesh.close()
    return status


def _fail(error: BaseException, name: str, debug: bool) -> int:
    """Report `error` once for the whole job and return the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the launcher ends the others when one of them is gone: not before the end
        signal.signal(number, signal.SIG_IGN)
    mesh = _mesh()
    if mesh is None:
        status, message = _describe(error, name)
        if message:
            say_for_all(message, None if launched_size() > 1 else True)
    else:
        mine = mesh.claim()
        status, message = _describe(error, name, mesh, explain=mine is not False)
        if message:
            say_for_all(message, mine)
        mesh.leave(status, mine)
    if debug and not isinstance(error, KeyboardInterrupt):
        traceback.print_exception(error)
    return status


def _describe(error: BaseException, name: str, mesh=None, explain: bool = False) -> tuple[int, str]:
    """(exit status, what to print; nothing where the reader of a single process went away).

    explain: this rank reports, and may take seconds to find out what became of the others.
    """
    alone = launched_size() == 1
    where = f", {mesh.where}" if mesh is not None else ""
    rank = f"rank {launched_rank()} of {launched_size()} (host {socket.gethostname()}{where})"
    terminated, lost = (False, None) if mesh is None else _from_others(error)
    missing = mesh.who_is_missing() if explain and (terminated or lost) else ""
    if terminated and not missing:
        return TERMINATED, f"bitkv: {rank}: terminated (SIGTERM)"
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, f"bitkv: interrupted{where}" if alone else f"bitkv: {rank}: interrupted"
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE, "" if alone else f"bitkv: {rank}: the reader of stdout went away"
    if isinstance(error, SystemExit):
        return (error.code, "") if isinstance(error.code, int) else (1, str(error.code))
    if isinstance(error, ValueError):
        return 2, f"bitkv {name}: {_one_line(error)}" + (f" [{rank}]" if mesh is not None and not alone else "")
    if terminated or lost:
        return 1, f"bitkv: {rank}: lost {missing or f'another rank without a word from it ({lost})'}"
    return 1, f"bitkv: {rank}: {type(error).__name__}: {_one_line(error)}"


def _speaks_for_host(until: contextlib.ExitStack) -> bool:
    """Before there is a mesh, ranks tend to fail alike: True for the first of those that one launcher started on this host.

    It holds a name in the kernel (an abstract socket, which ends with the process) while the others find it taken.
    """
    claim = until.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    try:
        claim.bind(f"\0bitkv-{os.getppid()}")
    except OSError:
        return False
    until.callback(time.sleep, _OTHERS_FAIL_S)
    return True


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


def _mesh():
    """The started mesh, without importing torch only to learn that there is none."""
    module = sys.modules.get("bitkv_dist.parallel.mesh")
    return module.current() if module else None


def _from_others(error: BaseException) -> tuple[bool, str | None]:
    """(whether a launcher or a person ends this rank, what happened to the connection to another rank).

    A rank that fails claims the report before it goes: then the others, which meet its loss, stay quiet.
    """
    from bitkv_dist.parallel.alarm import Terminated, lost_peer

    return isinstance(error, Terminated), lost_peer(error)


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
