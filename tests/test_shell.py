"""How a command ends: one line, the right status, no hang, whatever rank fails and whichever launcher started it (C36)."""

import os
import re
import signal
import subprocess
import sys

import pytest
from ranks import ROOT, environment, launched, run_command

from bitkv_dist.launch import shell

SCRIPT = """
import os, sys, time
from bitkv_dist.launch import shell

def main(argv):
    parser = shell.Parser("trial", "A trial.")
    parser.add_argument("--fault", default="none")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--text")
    args = parser.parse_args(argv)
    if args.fault == "early":
        raise ValueError("field 7: must be\\n8; use 8")
    from bitkv_dist.config import ParallelConfig
    from bitkv_dist.parallel.mesh import start
    import torch
    mesh = start(ParallelConfig(device="cpu", start_timeout_s=60, step_timeout_s=60), say=shell.say_for_all)
    mesh.ready()
    sys.stdout.write(f"text {args.text}\\n")  # at once, or the lines of two ranks mix
    sys.stdout.flush()
    if mesh.world.rank == args.rank or args.rank < 0:
        sys.stderr.write(f"fault at {time.time()}\\n")  # in one piece, as above
        if args.fault == "raise":
            raise RuntimeError("boom\\n  and more")
        if args.fault == "value":
            raise ValueError("prompt 3: is empty; give some text")
        if args.fault == "kill":
            os.kill(os.getpid(), 9)
        if args.fault == "exit":
            sys.exit("bitkv trial: no more")
        if args.fault == "interrupt":
            raise KeyboardInterrupt
        if args.fault == "print":
            while True:
                print("x" * 1000)
    elif args.busy:
        time.sleep(1000)
    for _ in range(3):
        mesh.gather_sp(torch.zeros(2))
    return 0

shell.run(main, "trial")
"""
FAILED_ON = r"bitkv: rank {rank} of 2 \(host .*, start-up\): "


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("shell") / "trial.py"
    path.write_text(SCRIPT)
    return path


def test_flags_fail_in_one_line(capsys, monkeypatch):
    parser = shell.Parser("trial", "A trial.")
    parser.add_argument("--size", type=int)
    assert parser.parse_args(["--local_rank=3", "--size", "1"]).size == 1
    assert parser.parse_args(["--local-rank", "3"]).local_rank == 3
    for argv, said in [
        (["--size", "big"], "bitkv trial: argument --size: invalid int value: 'big'; see --help\n"),
        (["--siz", "1"], "bitkv trial: unrecognized arguments: --siz 1; see --help\n"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args(argv)
        assert capsys.readouterr().err == said
        monkeypatch.setenv("RANK", "1")  # the other ranks have the same command line
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args(argv)
        assert capsys.readouterr().err == ""
        monkeypatch.delenv("RANK")


def test_one_process(script):
    def run(*args, **env):
        return run_command(launched("python", 1, script, *args), **env)

    fine = run("--text", 'a dir/it\'s & "x".txt')
    assert (fine.status, fine.out, fine.messages()) == (0, 'text a dir/it\'s & "x".txt\n', [])
    early = run("--fault", "early")
    assert (early.status, early.err) == (2, "bitkv trial: field 7: must be 8; use 8\n")
    raised = run("--fault", "raise")
    assert raised.status == 1 and "Traceback" not in raised.err
    assert raised.messages()[0].endswith("): RuntimeError: boom and more") and len(raised.messages()) == 1
    assert "Traceback" in run("--fault", "raise", BITKV_DEBUG="1").err
    assert run("--fault", "interrupt").status == shell.INTERRUPTED


def printing_for_ever(script) -> subprocess.Popen:
    argv = launched("python", 1, script, "--fault", "print")
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    process.stdout.readline()
    return process


def test_a_reader_that_goes_away_ends_the_run_quietly(script):
    process = printing_for_ever(script)
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait(timeout=20) == shell.BROKEN_PIPE
    assert [line for line in said.splitlines() if not line.startswith("fault at")] == []


def test_interrupt(script):
    process = printing_for_ever(script)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == shell.INTERRUPTED


def test_our_folders_hide_no_package(tmp_path):
    """A script in launch/ must not find launch/ or the root's kernels/ when something imports `evaluate` or `kernels`."""
    code = "import sys; from bitkv_dist.launch import shell\nshell.run(lambda argv: print(sys.path) or 0, 'trial')"
    paths = f"{ROOT / 'launch'}{os.pathsep}{ROOT}{os.pathsep}{tmp_path}"
    ended = run_command([sys.executable, "-c", code], PYTHONPATH=paths)
    assert ended.status == 0, ended.err
    assert str(tmp_path) in ended.out
    assert f"'{ROOT}'" not in ended.out and f"'{ROOT / 'launch'}'" not in ended.out and "''" not in ended.out


def fails_as(script, launcher, message: str | None, status: int, *args: str) -> None:
    """The whole job ends within seconds, with one message of ours and, where the launcher passes it on, the status."""
    ended = run_command(launched(launcher, 2, script, *args))
    assert ended.status != 0
    if launcher != "torchrun":  # which ends with 1 whatever its ranks say
        assert ended.status == status
    said = ended.messages()
    if message is None:
        assert said == []
    else:
        assert len(said) == 1 and re.search(message, said[0]), ended.err
    assert (
        "Traceback" not in "\n".join(line for line in ended.err.splitlines() if "torch" not in line) or launcher == "torchrun"
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_raises(script, rank):
    message = FAILED_ON.format(rank=rank) + "RuntimeError: boom and more"
    fails_as(script, "mpirun", message, 1, "--fault", "raise", "--rank", str(rank))


def test_the_same_refusal_on_all_ranks_is_printed_once(script):
    fails_as(script, "mpirun", "^bitkv trial: field 7: must be 8; use 8$", 2, "--fault", "early")
    named = r"^bitkv trial: prompt 3: is empty; give some text \[rank . of 2 \(host .*\)\]$"
    fails_as(script, "mpirun", named, 2, "--fault", "value", "--rank", "-1")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun", "mpirun"])
@pytest.mark.parametrize(
    ("fault", "message", "status"),
    [
        ("raise", FAILED_ON + "RuntimeError: boom and more", 1),
        ("value", r"^bitkv trial: prompt 3: is empty; give some text \[rank {rank} of 2 \(host .*\)\]$", 2),
        ("exit", "^bitkv trial: no more$", 1),
        ("interrupt", FAILED_ON + "interrupted$", shell.INTERRUPTED),
    ],
)
def test_faults(script, launcher, fault, message, status):
    for rank, busy in ((0, []), (1, ["--busy"])):
        expected = message and message.replace("{rank}", str(rank))
        fails_as(script, launcher, expected, status, "--fault", fault, "--rank", str(rank), *busy)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun", "mpirun"])
def test_arguments_arrive_intact(script, launcher):
    """C36."""
    path = 'a dir/it\'s & "x".txt'
    ended = run_command(launched(launcher, 2, script, "--text", path))
    assert ended.status == 0 and ended.messages() == [], ended.err
    assert ended.out.splitlines().count(f"text {path}") == 2


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_killed_rank_is_noticed_by_the_others(script, launcher):
    for rank in (0, 1):
        expected = FAILED_ON.format(rank=1 - rank) + rf"lost rank {rank} \(host .*\)"
        ended = run_command(launched(launcher, 2, script, "--fault", "kill", "--rank", str(rank)))
        assert ended.status != 0
        (message,) = ended.messages()  # although the launcher ends the other rank at once
        assert re.search(expected, message), message
