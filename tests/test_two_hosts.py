"""Two hosts with two ranks each, as Linux network namespaces on this machine, joined by a bridge: the tokens are those of one
process, and a link that goes down ends the job.

Needs root and iproute2. Each host has a network, a process table and a name of its own; the processes share the files. One
host starts the ranks of both through ssh, which also needs openssh-server and pdsh.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny
from ranks import ROOT, environment, run_command

PORT = 29577
GENERATE = ROOT / "launch" / "generate.py"
SYSTEM_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


def unavailable() -> str:
    """Why such hosts cannot be made here; empty when they can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in ("ip", "unshare") if not shutil.which(tool)]
    if missing:
        return f"needs {missing[0]} (iproute2, util-linux)"
    probe = subprocess.run(["unshare", "--net", "--uts", "--pid", "--fork", "true"], capture_output=True, text=True)
    return f"no namespaces here: {probe.stderr.strip()}" if probe.returncode else ""


REASON = unavailable()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON)]


@dataclass(frozen=True)
class Host:
    space: str
    name: str
    address: str
    link: str  # its end of the cable, in the bridge's namespace

    def command(self, argv: list[str]) -> list[str]:
        """Run as this host: network by `ip netns exec`, name and process table by `unshare`; ends with the first process."""
        inside = f"hostname {self.name} && exec {shlex.join(argv)}"
        new = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", inside]
        return ["ip", "netns", "exec", self.space, *new]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    tag = f"bk{os.getpid() % 100000}"
    bridge = f"{tag}b"
    made = [Host(f"{tag}n{i}", f"node{i}", f"10.77.0.{i + 1}", f"{tag}v{i}") for i in range(2)]
    names = Path("/etc/netns")
    try:
        ip("netns", "add", bridge)
        ip("-n", bridge, "link", "add", "br0", "type", "bridge")
        ip("-n", bridge, "link", "set", "br0", "up")
        for host in made:
            ip("netns", "add", host.space)
            ip("-n", bridge, "link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.space)
            ip("-n", bridge, "link", "set", host.link, "master", "br0", "up")
            ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", "eth0")
            ip("-n", host.space, "link", "set", "eth0", "up")
            ip("-n", host.space, "link", "set", "lo", "up")
            (names / host.space).mkdir(parents=True)
            lines = ["127.0.0.1 localhost", *(f"{other.address} {other.name}" for other in made)]
            (names / host.space / "hosts").write_text("\n".join(lines) + "\n")
        yield made
    finally:
        for space in (*(host.space for host in made), bridge):
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
        for host in made:
            shutil.rmtree(names / host.space, ignore_errors=True)
        with contextlib.suppress(OSError):
            names.rmdir()


@pytest.fixture
def ssh(hosts, tmp_path) -> Iterator[dict[str, str]]:
    """A server on each host, and an `ssh` that reaches them with a key of this test; yields what the environment must have."""
    missing = [tool for tool in ("sshd", "pdsh", "ssh-keygen") if not shutil.which(tool, path=SYSTEM_PATH)]
    if missing:
        pytest.skip(f"needs {missing[0]} (openssh-server, pdsh)")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    (tmp_path / "sshd").write_text(
        f"HostKey {tmp_path / 'host'}\nAuthorizedKeysFile {tmp_path / 'user.pub'}\nPermitRootLogin prohibit-password\n"
        "StrictModes no\nUsePAM no\nPidFile none\n"
    )
    settings = {"IdentityFile": tmp_path / "user", "StrictHostKeyChecking": "no", "UserKnownHostsFile": tmp_path / "known"}
    words = [f"-o{name}={value}" for name, value in {**settings, "LogLevel": "ERROR"}.items()]
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F none {shlex.join(words)} "$@"\n')
    (tools / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    servers = []
    try:
        for host in hosts:
            argv = host.command([shutil.which("sshd", path=SYSTEM_PATH), "-D", "-e", "-f", str(tmp_path / "sshd")])
            servers.append(subprocess.Popen(argv, stderr=(tmp_path / f"sshd-{host.name}").open("w"), start_new_session=True))
        yield {"PATH": f"{tools}:{SYSTEM_PATH}"}
    finally:
        for server in servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("two hosts")
    tiny.save_tokenizer(tiny.save(folder / "model", vocab_size=257))
    config = folder / "run.yaml"
    config.write_text(
        "cache: {codec: planes, key_bits: 2, value_bits: 2, page_tokens: 64, sink_tokens: 64, recent_tokens: 32}\n"
        "parallel: {device: cpu, start_timeout_s: 100, step_timeout_s: 15}\n"
    )
    prompt = ["--prompt", "two hosts with two ranks each " * 70, "--ignore-eos"]
    return ["--model", str(folder / "model"), "--config", str(config), *prompt]


@contextlib.contextmanager
def started(hosts: list[Host], flags: list[str], logs: Path) -> Iterator[list[subprocess.Popen]]:
    """What `bitkv launch --launcher torchrun` starts on each host."""
    hostfile = logs / "hosts"
    hostfile.write_text("".join(f"{host.name} slots=2\n" for host in hosts))
    where = ["--hostfile", str(hostfile), "--launcher", "torchrun", "--master-port", str(PORT)]
    command = [sys.executable, str(ROOT / "launch" / "launch.py"), *where, "generate", *flags]
    running = []
    try:
        for host in hosts:
            with (logs / host.name).open("w") as log:
                running.append(
                    subprocess.Popen(
                        host.command(command), env=environment(), stdout=log, stderr=log, start_new_session=True, cwd=ROOT
                    )
                )
        yield running
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def said(hosts: list[Host], logs: Path) -> str:
    return "".join(f"--- {host.name}\n{(logs / host.name).read_text()}" for host in hosts)


def test_two_hosts_give_the_tokens_of_one_process(hosts, flags, tmp_path):
    length = ["--max-new-tokens", "24", "--digest"]
    alone = tmp_path / "alone.json"
    ended = run_command([sys.executable, GENERATE, *flags, *length, "--json", str(alone)])
    assert ended.status == 0, ended.err
    together = tmp_path / "together.json"
    with started(hosts, [*flags, *length, "--json", str(together)], tmp_path) as running:
        statuses = [process.wait(timeout=150) for process in running]
        assert statuses == [0, 0], said(hosts, tmp_path)
    one, four = json.loads(alone.read_text()), json.loads(together.read_text())
    assert (one["world"]["size"], four["world"]["size"], four["world"]["sp"]) == (1, 4, 4)
    assert four["token_ids"] == one["token_ids"] and four["digest"] == one["digest"]
    ranks = re.findall(r"bitkv: rank (\d) \(host (\S+)\) on cpu, backend gloo, 1 thread", said(hosts, tmp_path))
    assert ranks == [("0", "node0"), ("1", "node0"), ("2", "node1"), ("3", "node1")]


def test_deepspeed_reaches_the_other_host_through_ssh(hosts, flags, ssh, tmp_path):
    length = ["--max-new-tokens", "24", "--digest"]
    reports = [tmp_path / "alone.json", tmp_path / "together.json"]
    ended = run_command([sys.executable, GENERATE, *flags, *length, "--json", str(reports[0])])
    assert ended.status == 0, ended.err
    hostfile = tmp_path / "hosts"
    hostfile.write_text("".join(f"{host.name} slots=2\n" for host in hosts))
    where = ["--hostfile", str(hostfile), "--launcher", "deepspeed"]
    where += ["--master-addr", hosts[0].address, "--master-port", str(PORT)]
    command = [sys.executable, str(ROOT / "launch" / "launch.py"), *where, "generate", *flags, *length]
    ended = run_command(hosts[0].command([*command, "--json", str(reports[1])]), **ssh)
    assert ended.status == 0, ended.err
    one, four = (json.loads(report.read_text()) for report in reports)
    assert (four["world"]["size"], four["world"]["sp"]) == (4, 4)
    assert four["token_ids"] == one["token_ids"] and four["digest"] == one["digest"]
    assert all(f"bitkv: rank {rank} (host node{rank // 2})" in ended.out + ended.err for rank in range(4))


def test_a_link_that_goes_down(hosts, flags, tmp_path):
    """Nobody hears anything any more: both hosts end by themselves, in time, and each says which ranks it misses."""
    bridge = hosts[0].space.removesuffix("n0") + "b"
    with started(hosts, [*flags, "--max-new-tokens", "1500"], tmp_path) as running:
        until = time.monotonic() + 120
        while "rotation digest" not in said(hosts, tmp_path):
            assert time.monotonic() < until and all(process.poll() is None for process in running), said(hosts, tmp_path)
            time.sleep(0.2)
        time.sleep(2)
        ip("-n", bridge, "link", "set", hosts[1].link, "down")
        cut = time.monotonic()
        try:
            statuses = [process.wait(timeout=35 - (time.monotonic() - cut)) for process in running]
        finally:
            ip("-n", bridge, "link", "set", hosts[1].link, "up")
        assert all(statuses), said(hosts, tmp_path)
        first = (tmp_path / "node0").read_text()
        assert re.search(r"bitkv: .*rank [23] \(host node1", first), said(hosts, tmp_path)
