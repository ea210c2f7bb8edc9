"""One step of all ranks that succeeds on all of them or fails on all of them, with one message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from bitkv_dist.parallel.mesh import Mesh

Found = TypeVar("Found")


def jointly(mesh: Mesh, what: str, step: Callable[[], Found], leader_only: bool = False) -> list[Found | None]:
    """What `step` returned on every rank, in rank order; collective. leader_only: only rank 0 takes it, None for the others.

    If it raised on some, every rank raises the message of the first of them after `what`: ValueError if it was one (something a
    user can put right), else RuntimeError. No rank is left waiting in a later exchange.
    """
    found, failure = None, None
    try:
        if mesh.world.rank == 0 or not leader_only:
            found = step()
    except ValueError as error:
        failure = (True, f"{what}: {error}", error)
    except Exception as error:
        failure = (False, f"{what}: rank {mesh.world.rank} failed ({brief(error)})", error)
    everyone = mesh.gather_objects((failure and failure[:2], found))
    for theirs, _ in everyone:
        if theirs is not None:
            raise (ValueError if theirs[0] else RuntimeError)(theirs[1]) from (failure and failure[2])
    return [result for _, result in everyone]


@contextmanager
def about(what: str) -> Iterator[None]:
    """Say what a refusal is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def brief(error: BaseException) -> str:
    """An error in one line, with its kind where its message does not tell."""
    message = " ".join(str(error).split())[:300]
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
