"""Who is who under each launcher, what a rank may use of its machine, and the collectives: CASES.md C31, C33, C35, C37."""

import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from ranks import free_port, launched, run_command, run_ranks

from bitkv_dist.config import ParallelConfig
from bitkv_dist.parallel.mesh import start
from bitkv_dist.parallel.world import Place, choose_device, choose_grid, discover, env_address, slurm_address, threads_per_rank

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}
DEEPSPEED = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4", "CROSS_RANK": "1", "CROSS_SIZE": "2"}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "11", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_STEP_NODELIST": "gpu[07-08,11]", "SLURM_JOB_ID": "812", "SLURM_STEP_ID": "0",
}  # fmt: skip


@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({}, Place(0, 1, 0, 1, "python")),
        (TORCHRUN, Place(5, 8, 1, 4, "torchrun")),
        (DEEPSPEED, Place(5, 8, 1, 4, "deepspeed")),
        (MPICH, Place(2, 4, 0, 2, "mpirun")),
        (OPENMPI, Place(3, 4, 1, 2, "mpirun")),
        (SLURM, Place(9, 11, 1, 3, "slurm")),
        (SLURM | TORCHRUN, Place(5, 8, 1, 4, "torchrun")),  # torchrun started by srun
        (SLURM | MPICH, Place(2, 4, 0, 2, "mpirun")),  # mpirun inside an allocation
        (SLURM | {"PMI_RANK": "9", "PMI_SIZE": "11"}, Place(9, 11, 1, 3, "slurm")),  # srun --mpi=pmi2
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}, Place(0, 1, 0, 1, "python")),  # a batch script
    ],
)
def test_discovery(env, place):
    assert discover(env) == place


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK"),
        ({"PMI_RANK": "0"}, "PMI_SIZE"),
        (TORCHRUN | {"RANK": "8"}, "rank 8 of 8"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "local rank 4 of 4"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE 'two'"),
    ],
)
def test_a_contradictory_environment_is_refused_in_one_line(env, named):
    with pytest.raises(ValueError, match=named) as refusal:
        discover(env)
    assert "\n" not in str(refusal.value)


def test_address_of_rank_0():
    assert env_address({"RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29511"}) == ("10.0.0.1", 29511)
    assert env_address({"RANK": "0", "MASTER_ADDR": "10.0.0.1"}) == ("10.0.0.1", 29500)
    assert slurm_address(SLURM)[0] == "gpu07"
    assert slurm_address({"SLURM_STEP_NODELIST": "login1,n2", "MASTER_PORT": "5"}) == ("login1", 5)
    assert slurm_address(SLURM)[1] != slurm_address(SLURM | {"SLURM_JOB_ID": "813"})[1]
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        env_address({"RANK": "0"})


def test_devices():
    place = discover(TORCHRUN)  # C33: rank 5, local rank 1
    assert choose_device("auto", place, gpus=4) == (torch.device("cuda:1"), "nccl")
    assert choose_device("cuda", place, gpus=8) == (torch.device("cuda:1"), "nccl")
    assert choose_device("auto", place, gpus=0) == (torch.device("cpu"), "gloo")
    assert choose_device("cpu", place, gpus=8) == (torch.device("cpu"), "gloo")
    assert choose_device("auto", Place(0, 1, 0, 1, "python"), gpus=2) == (torch.device("cuda:0"), "none")
    assert choose_device("auto", discover(SLURM), gpus=1) == (torch.device("cuda:0"), "nccl")  # bound by srun
    for gpus in (1, 3):
        with pytest.raises(ValueError, match=f"4 ranks on host .*: more than its {gpus} GPUs; .*--device cpu"):
            choose_device("auto", place, gpus)
    with pytest.raises(ValueError, match="no GPU"):
        choose_device("cuda", place, gpus=0)
    with pytest.raises(ValueError, match="device cuda:3"):
        choose_device("cuda:3", place, gpus=4)


def test_threads(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert threads_per_rank(Place(0, 8, 0, 4, "deepspeed"), {}) == 4
    assert threads_per_rank(Place(0, 64, 0, 32, "deepspeed"), {}) == 1
    assert threads_per_rank(Place(0, 8, 0, 3, "mpirun"), {}) == 5
    assert threads_per_rank(Place(0, 8, 0, 4, "deepspeed"), {"OMP_NUM_THREADS": "7"}) is None


def test_grid():
    assert choose_grid(1, None, 4) == (1, 4)
    assert choose_grid(2, None, 4) == (2, 2)
    assert choose_grid(4, 1, 4) == (4, 1)
    for tp, sp, size in [(3, None, 4), (2, 4, 4), (8, None, 4), (1, 0, 4), (0, None, 4), (1, 2, 1), (2, None, 1)]:
        with pytest.raises(ValueError, match=f"tp {tp}") as refusal:
            choose_grid(tp, sp, size)
        assert "\n" not in str(refusal.value)


def test_a_world_of_one_needs_no_process_group(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    mesh = start(ParallelConfig(device="cpu"))
    assert (mesh.world.launcher, mesh.world.backend, mesh.tp, mesh.sp) == ("python", "none", 1, 1)
    assert not torch.distributed.is_initialized()
    values = torch.arange(3)
    assert torch.equal(mesh.gather_sp(values), values[None])
    assert mesh.broadcast("x") == "x" and mesh.gather_objects(7) == [7] and mesh.all_equal(values)
    assert torch.equal(mesh.broadcast_tensor(values), values)
    assert torch.equal(mesh.sum(values, True), values) and torch.equal(mesh.gather(values, False), values[None])
    assert torch.equal(mesh.swap_sp(values[None]), values[None])
    assert (mesh.gathers, mesh.sp_bytes) == (1, 0)
    mesh.ready()
    mesh.close()


DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int64, torch.bool)


def collectives(mesh):
    """What each of 2 x 2 ranks sees."""
    rank = mesh.world.rank
    gathered = {}
    for dtype in DTYPES:
        mine = torch.tensor([[rank, 1], [-1.5, 0]]).to(dtype).T  # not contiguous
        out = mesh.gather_sp(mine)
        others = torch.stack([torch.tensor([[r, 1], [-1.5, 0]]).to(dtype).T for r in (mesh.tp_rank, 2 + mesh.tp_rank)])
        gathered[dtype] = out.dtype == dtype and torch.equal(out, others)
    counted = (mesh.gathers, mesh.sp_bytes)
    shapes = [tuple(mesh.gather_sp(torch.zeros(shape)).shape) for shape in ((), (0, 3), (1,))]
    refusal = ""
    try:
        mesh.gather_sp(torch.zeros(1 + mesh.sp_rank))
    except RuntimeError as error:
        refusal = str(error)
    full = torch.tensor([-1, 2**63 - 1, -(2**63), 0])
    one_off = full + torch.tensor([0, 0, 0, int(rank == 3)])
    swapped = mesh.swap_sp(torch.tensor([[rank, 0], [rank, 1]], dtype=torch.bfloat16))
    mesh.ready()
    return {
        "place": (mesh.sp_rank, mesh.tp_rank),
        "gathered": gathered,
        "counted": counted,
        "shapes": shapes,
        "refusal": refusal,
        "broadcast": (mesh.broadcast({"from": rank}), mesh.broadcast_tensor(torch.tensor([rank])).item()),
        "objects": mesh.gather_objects(rank),
        "equal": (mesh.all_equal(full), mesh.all_equal(one_off)),
        "sums": [mesh.sum(torch.ones(1) * (rank + 1), everyone).item() for everyone in (False, True)],
        "gathers": [mesh.gather(torch.tensor([rank]), everyone).flatten().tolist() for everyone in (False, True)],
        "swapped": swapped.tolist(),
        "threads": torch.get_num_threads(),
    }


def test_collectives_of_2_x_2_ranks():
    results = run_ranks(4, collectives, tp=2)
    assert [seen["place"] for seen in results] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    payload = sum(4 * torch.empty(0, dtype=dtype).element_size() for dtype in DTYPES)
    for seen in results:
        assert all(seen["gathered"].values()), seen["gathered"]
        assert seen["counted"] == (len(DTYPES), payload)
        assert seen["shapes"] == [(2,), (2, 0, 3), (2, 1)]
        assert "different tensors: [((1,), 'torch.float32'), ((2,), 'torch.float32')]" in seen["refusal"]
        assert seen["broadcast"] == ({"from": 0}, 0)
        assert seen["objects"] == [0, 1, 2, 3]
        assert seen["equal"] == (True, False)
        assert seen["threads"] == 1
    assert [seen["sums"] for seen in results] == [[3, 10], [3, 10], [7, 10], [7, 10]]
    assert [seen["gathers"] for seen in results] == [[[0, 1], [0, 1, 2, 3]]] * 2 + [[[2, 3], [0, 1, 2, 3]]] * 2
    assert [seen["swapped"] for seen in results] == [[[r % 2, r // 2], [2 + r % 2, r // 2]] for r in range(4)]


START = """
import sys
from bitkv_dist.config import ParallelConfig
from bitkv_dist.parallel.mesh import start
mesh = start(ParallelConfig(device="cpu", start_timeout_s=float(sys.argv[-1])))
ranks = mesh.gather_objects((mesh.world.rank, mesh.world.local_rank, mesh.world.local_size))
sys.stdout.write(f"{mesh.world.launcher} {ranks}\\n")  # at once, or the lines of two ranks mix
mesh.close()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("a dir") / "it's & start.py"
    path.write_text(START)
    return path


@pytest.mark.parametrize("launcher", ["mpirun", "torchrun", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_ranks_under_a_launcher(launcher, script):
    ended = run_command(launched(launcher, 2, script, "60"))
    assert ended.status == 0, ended.err
    assert ended.out.count(f"{launcher} [(0, 0, 2), (1, 1, 2)]") == 2, ended.out


def test_two_jobs_on_two_ports(script):
    """C35: neither sees the other's ranks."""
    commands = [launched("torchrun", size, script, "60") for size in (2, 3)]
    with ThreadPoolExecutor(2) as pool:
        two, three = pool.map(run_command, commands)
    assert (two.status, three.status) == (0, 0), two.err + three.err
    assert two.out.count("torchrun [(0, 0, 2), (1, 1, 2)]") == 2
    assert three.out.count("torchrun [(0, 0, 3), (1, 1, 3), (2, 2, 3)]") == 3


def test_a_busy_port_and_missing_ranks_are_named(monkeypatch):
    def refusal(rank: int, port: int) -> str:
        place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
        for name, value in (place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}).items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(ValueError) as refused:
            start(ParallelConfig(device="cpu", start_timeout_s=1))
        assert not torch.distributed.is_initialized()
        return str(refused.value)

    with socket.create_server(("", 0)) as busy:
        port = busy.getsockname()[1]
        assert re.match(f"port {port} on .*: already in use.*--master_port$", refusal(0, port))
    assert re.match("start_timeout_s 1: not all 2 ranks came up in that time", refusal(0, free_port()))
    assert re.match(r"rank 0 at 127.0.0.1:\d+: did not answer within 1 s; .*--master_port$", refusal(1, free_port()))
