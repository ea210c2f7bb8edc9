"""The hostfile: one `HOST slots=N` line per host, in the order of the ranks. Read strictly, before anything is started.

deepspeed falls back to one node with a mere warning when it finds no hostfile, and takes `slots = 4` for a broken line only on
some of its paths; Open MPI reads `w0:4` as the name of a host. What all of them understand is accepted, the rest is refused.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"(?P<host>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)[ \t]+slots=(?P<slots>[0-9]+)")
_EXAMPLE = "write HOST slots=N, for example node0 slots=8"


class Host(NamedTuple):
    name: str
    slots: int  # ranks to start there

    @property
    def is_here(self) -> bool:
        name = socket.gethostname()
        return self.name in {"localhost", "127.0.0.1", name, name.partition(".")[0]}


def read_hostfile(path: str) -> list[Host]:
    """The hosts of a file. Tabs, CRLF, empty lines and # comments are fine; ValueError with line and reason for the rest."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"hostfile {path!r}: cannot be read ({error.strerror}); give an existing file") from None
    hosts: list[Host] = []
    for number, raw in enumerate(content.split(b"\n"), 1):
        where = f"hostfile {path!r} line {number}"
        if raw.startswith(b"\xef\xbb\xbf"):
            raise ValueError(f"{where}: begins with a byte order mark, which becomes part of the host's name; save it without")
        try:
            line = raw.decode("ascii").partition("#")[0].strip(" \t\r")
        except UnicodeDecodeError:
            raise ValueError(f"{where}: {raw!r} is not ASCII; {_EXAMPLE}") from None
        if not line:
            continue
        host = _host(where, line)
        if any(host.name == other.name for other in hosts):
            raise ValueError(f"{where}: host {host.name} is there twice; give all its slots in one line")
        hosts.append(host)
    if not hosts:
        raise ValueError(f"hostfile {path!r}: names no host; {_EXAMPLE}")
    return hosts


def _host(where: str, line: str) -> Host:
    found = _LINE.fullmatch(line)
    if found and int(found["slots"]):
        return Host(found["host"], int(found["slots"]))
    if found or re.search(r"slots=-", line):
        rule = "slots must be at least 1"
    elif re.search(r"slots\s*=\s*$", line):
        rule = "slots has no number"
    elif re.search(r"slots\s+=|=\s", line):
        rule = "no blanks around ="
    elif re.fullmatch(r"\S+:\d+", line):
        rule = "HOST:N is another launcher's form"
    elif not re.search(r"\s", line):
        rule = "slots=N is missing"
    else:
        rule = "not understood"
    raise ValueError(f"{where}: {line!r}: {rule}; {_EXAMPLE}")
