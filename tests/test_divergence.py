"""All ranks follow rank 0, and what they were fed is compared in every step: CASES.md C30."""

import socket

import pytest
import torch
from ranks import run_ranks

STEPS = 256


def followed(mesh, folder):
    """(token ids, digests of all steps) of this rank: with a seed, the same with noise on rank 1's logits, without a seed."""
    import tiny

    from bitkv_dist import model
    from bitkv_dist.cache_config import CacheConfig
    from bitkv_dist.config import GenerateConfig
    from bitkv_dist.engine import Engine

    class Watched(Engine):
        noise = 0.0

        def choose(self, logits, live, result, on_token):
            self.digests.append(self.fed)
            return super().choose(logits + self.noise * torch.randn_like(logits), live, result, on_token)

    served = model.load(str(folder), dtype=torch.float32, device=torch.device("cpu"))
    cache = CacheConfig(key_bits=2, value_bits=2, page_tokens=64, sink_tokens=64, recent_tokens=32)
    found = []
    for noise, seed in ((0.0, 3), (1e-2 * (mesh.world.rank == 1), 3), (0.0, None)):
        settings = GenerateConfig(max_new_tokens=STEPS, temperature=1.0, sampling_seed=seed, ignore_eos=True)
        engine = Watched(served, cache, mesh, settings)
        engine.noise, engine.digests = noise, []
        found.append((engine.generate([tiny.prompt(700)]).token_ids, engine.digests))
    return found


@pytest.mark.slow
def test_ranks_follow_rank_0_whatever_their_own_logits(tmp_path):
    import tiny

    first, second = run_ranks(2, followed, tiny.save(tmp_path))
    assert first == second
    seeded, noisy, unseeded = first
    assert seeded == noisy and seeded[0] != unseeded[0]
    for tokens, digests in first:
        assert len(tokens[0]) == len(digests) == len(set(digests)) == STEPS


def strayed(mesh):
    """What each rank says when rank 1 comes with another digest in the third exchange."""
    said = []
    for step in range(4):
        mesh.mark(f"step {step}")
        digest = 2**64 - 1 - step - 1000 * (step == 2 and mesh.world.rank == 1)
        try:
            said.append(mesh.broadcast_checked(torch.tensor([[mesh.world.rank, step]]), digest).tolist())
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_the_rank_that_strays_is_named_with_its_step():
    everyone = run_ranks(3, strayed)
    plain = [[[0, step]] for step in range(4)]
    assert everyone[0] == everyone[2] == plain
    (message,) = [said for said in everyone[1] if isinstance(said, str)]
    assert everyone[1] == [*plain[:2], message, plain[3]]
    named = f"rank 1 (host {socket.gethostname()}, step 2)"
    assert message == f"{named}: has other tokens or shapes than the others since step 2"


@pytest.mark.parametrize("numbers", [[], [0], [1, 2], [2, 1], [-1]])
def test_a_chained_digest_knows_the_order_and_what_came_before(numbers):
    from bitkv_dist.parallel.digest import chained

    seen = {chained(before, numbers) for before in (0, 1, 2**64 - 1)}
    assert len(seen) == 3 and chained(0, [*numbers, 0]) not in seen
