"""What `bitkv launch` prints, and the hostfiles that it takes and refuses: CASES.md C34."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import ROOT, environment, run_command

from bitkv_dist.launch import commands, launch
from bitkv_dist.launch.hostfile import Host, read_hostfile

PROMPT = 'a dir/it\'s & "x" $HOME 50%.txt'
GENERATE = str(ROOT / "launch" / "generate.py")
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "8"}


@pytest.fixture(autouse=True)
def no_allocation(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def hostfile(tmp_path):
    def write(content: bytes) -> str:
        (tmp_path / "hosts").write_bytes(content)
        return str(tmp_path / "hosts")

    return write


@pytest.fixture
def printed(capsys):
    """(what `bitkv launch --print` writes as lists of words, what it announces)."""

    def call(*argv: str) -> tuple[list[list[str]], str]:
        assert launch.main([*map(str, argv[:-1]), "--print", *argv[-1]]) == 0
        captured = capsys.readouterr()
        return [shlex.split(line, comments=True) for line in captured.out.splitlines() if line[0] != "#"], captured.err

    return call


@pytest.mark.parametrize(
    ("content", "hosts"),
    [
        (b"w0 slots=4\n", [("w0", 4)]),
        (b"w0\tslots=4\r\nw1 \t slots=16\r\n", [("w0", 4), ("w1", 16)]),
        (b"# hosts\n\n  w0 slots=4  # the first\n10.0.0.7 slots=1", [("w0", 4), ("10.0.0.7", 1)]),
    ],
)
def test_hostfiles_that_are_taken(hostfile, content, hosts):
    assert read_hostfile(hostfile(content)) == [Host(*host) for host in hosts]


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        (b"w0 slots=4\nw1 slots = 4\n", 2, "no blanks around ="),
        (b"w0:4\n", 1, "another launcher's form"),
        (b"w0 slots=\n", 1, "slots has no number"),
        (b"w0 slots=0\n", 1, "at least 1"),
        (b"w0 slots=-2\n", 1, "at least 1"),
        (b"\xef\xbb\xbfw0 slots=4\n", 1, "byte order mark"),
        (b"w0 slots=4\n# again\nw0 slots=2\n", 3, "host w0 is there twice"),
        (b"w0\n", 1, "slots=N is missing"),
        (b"w0 slots=4 max_slots=8\n", 1, "not understood"),
        (b"w0 slots=four\n", 1, "not understood"),
        (b"w\xc3\xb6 slots=4\n", 1, "not ASCII"),
    ],
)
def test_hostfiles_that_are_refused(hostfile, content, line, reason):
    with pytest.raises(ValueError, match=rf"^hostfile '.*' line {line}: .*{reason}") as refused:
        read_hostfile(hostfile(content))
    assert "\n" not in str(refused.value) and "; " in str(refused.value)


def test_a_hostfile_without_hosts_and_one_that_is_not_there(hostfile):
    with pytest.raises(ValueError, match="names no host"):
        read_hostfile(hostfile(b"# nothing\n"))
    with pytest.raises(ValueError, match="'/no/hosts': cannot be read"):
        read_hostfile("/no/hosts")


def test_the_example_of_two_nodes(printed):
    """configs/1m_2x8.yaml and its hostfile with every launcher that reads one."""
    hosts = str(ROOT / "configs" / "hostfile_2x8")
    command = ["generate", "--config", "1m_2x8", "--prompt-file", "library.txt"]
    settings = ["--config", "1m_2x8", "--tp", "8", "--sp", "2", "--prompt-file", "library.txt"]

    ((tool, *words),), said = printed("--hostfile", hosts, command)
    assert said == "bitkv launch: 16 ranks on 2 hosts (node0: 8, node1: 8), tp 8 x sp 2, by deepspeed\n"
    where = ["--hostfile", hosts, "--launcher", "pdsh", "--master_addr", "node0", "--master_port", "29500"]
    assert Path(tool).name == "deepspeed" and words == [*where, GENERATE, *settings]

    for runner in ("openmpi", "mpich"):
        ((tool, *words),), _ = printed("--hostfile", hosts, "--runner", runner, command)
        assert words == [*(runner if word == "pdsh" else word for word in where), GENERATE, *settings]

    lines, _ = printed("--hostfile", hosts, "--launcher", "torchrun", "--master-port", "29501", command)
    for node, (tool, *words) in enumerate(lines):
        where = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", "node0"]
        where += ["--nproc-per-node", "8", "--master-port", "29501"]
        assert Path(tool).name == "torchrun" and words == [*where, GENERATE, *settings]
    assert len(lines) == 2

    ((tool, *words),), _ = printed("--hostfile", hosts, "--launcher", "mpirun", command)
    assert Path(tool).name == "mpirun"
    assert words == ["-n", "16", "-host", "node0:8,node1:8", sys.executable, GENERATE, *settings]


def test_a_slurm_allocation(printed, monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    (words,), said = printed(["generate", "--config", "1m_2x8", "--prompt", PROMPT])
    where = ["--nodes", "2", "--ntasks", "16", "--ntasks-per-node", "8", "--kill-on-bad-exit=1"]
    settings = ["--config", "1m_2x8", "--tp", "8", "--sp", "2", "--prompt", PROMPT]
    assert words == ["srun", *where, sys.executable, GENERATE, *settings]
    assert "16 ranks on 2 hosts" in said
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    assert "8 ranks on 2 hosts" in printed(["generate", "--prompt", "x"])[1]
    monkeypatch.delenv("SLURM_GPUS_ON_NODE")
    with pytest.raises(ValueError, match="ranks: the allocation says neither"):
        launch.main(["--print", "generate"])


def test_one_host(printed):
    ((_, *words),), _ = printed("--ranks", "2", ["generate", "--kv-bits", "2"])
    assert words == ["--num_gpus", "2", "--master_port", "29500", GENERATE, "--tp", "1", "--sp", "2", "--kv-bits", "2"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--ranks", "3", "generate", "--tp", "2"], "tp 2 x sp ranks/tp: the product must be the number of ranks, 3"),
        (["--hostfile", "HOSTS", "generate", "--tp", "2", "--sp", "4"], "tp 2 x sp 4: the product must be .* ranks, 16"),
        (["--hostfile", "HOSTS", "generate", "--config", "1m"], "config '1m'"),
        (["generate"], "hostfile: none given"),
        (["--ranks", "2", "--launcher", "srun", "generate"], "launcher srun: there is no Slurm allocation"),
        (["--hostfile", "HOSTS", "--ranks", "2", "generate"], "ranks 2 and hostfile"),
        (["--ranks", "2", "--launcher", "mpirun", "--master-port", "7", "generate"], "master-port 7: read by deepspeed"),
        (["--ranks", "2", "--node-rank", "0", "generate"], "node-rank 0: read by torchrun alone, not by deepspeed"),
        (["--ranks", "2", "plan"], "command 'plan': cannot be launched"),
        (["--hostfile", "HOSTS", "--launcher", "torchrun", "generate"], "launcher torchrun: host .* not in the hostfile"),
        (["--hostfile", "HOSTS", "--launcher", "torchrun", "--node-rank", "2", "generate"], "node-rank 2: .* numbered 0 to 1"),
    ],
)  # fmt: skip
def test_what_is_refused(argv, said, monkeypatch):
    monkeypatch.setattr(os, "execvp", lambda *words: pytest.fail(f"started {words}"))
    hosts = str(ROOT / "configs" / "hostfile_2x8")
    with pytest.raises(ValueError, match=f"^{said}") as refused:
        launch.main([hosts if word == "HOSTS" else word for word in argv])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_unequal_slots(hostfile, launcher):
    hosts = read_hostfile(hostfile(b"w0 slots=4\nw1 slots=2\n"))
    job = commands.Job(hosts, "hosts", "w0", 1, Path(GENERATE), [])
    with pytest.raises(ValueError, match=f"w1 has 2 slots and w0 4, but {launcher} starts the same number everywhere"):
        commands.command_line(launcher, job)


def test_arguments_survive_the_shell_behind_pdsh():
    """What deepspeed and pdsh make of the words on their way to the remote shell: quotes around blanks, %% for %."""
    words = [PROMPT, "it's", "a;b", "$HOME", "`x`", '"', "100%n", "back\\slash", "a \\ b", "*", "plain"]
    job = commands.Job([Host("w0", 2), Host("w1", 2)], "hosts", "w0", 1, Path(GENERATE), words)
    passed = commands.command_line("deepspeed", job)[-len(words) :]
    quoted = ['"{}"'.format(word.replace('"', '\\"')) if " " in word else word for word in passed]
    remote = " ".join(quoted).replace("%%", "%")
    show = f"{sys.executable} -c 'import sys; print(sys.argv[1:])' {remote}"
    assert subprocess.run(["sh", "-c", show], capture_output=True, text=True).stdout == f"{words}\n"
    with pytest.raises(ValueError, match="line break"):
        commands.command_line("deepspeed", commands.Job(job.hosts, "hosts", "w0", 1, Path(GENERATE), ["a\nb"]))


def test_bad_hostfile_ends_in_one_line(hostfile):
    argv = [sys.executable, ROOT / "launch" / "launch.py", "--hostfile", hostfile(b"w0:4\n"), "--print", "generate"]
    ended = run_command(argv)
    assert (ended.status, ended.out, len(ended.messages())) == (2, "", 1)
    assert "line 1: 'w0:4': HOST:N is another launcher's form" in ended.err


def test_the_slurm_script(tmp_path):
    """With a stand-in for srun that shows what it is given, in an allocation of one node."""
    stand_in = tmp_path / "srun"
    stand_in.write_text('#!/bin/sh\necho "srun $*"\n')
    stand_in.chmod(0o755)
    allocation = SLURM | {"SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS_PER_NODE": "2", "SLURM_CPUS_PER_TASK": "3"}
    path = f"{tmp_path}:{environment()['PATH']}"
    bitkv = str(Path(sys.executable).with_name("bitkv"))
    script = ["bash", ROOT / "launch" / "slurm" / "bitkv.sbatch", "generate", "--prompt", "x"]
    ended = run_command(script, PATH=path, BITKV=bitkv, **allocation)
    assert ended.status == 0, ended.err
    shown, started = ended.out.splitlines()
    assert shown == started and "--ntasks 2 --ntasks-per-node 2" in shown and shown.endswith("--tp 1 --sp 2 --prompt x")
