"""KV cache blocks copied from another worker over TCP."""

from tests.unit.cpu.test_tiers import BLOCKS, PROMPTS, Make

from dynamo.kvbm.logical.blocks import Tier


def test_tiers_copy_blocks_from_the_peer_named_by_the_router(
    tiered: Make, answers: Make, make_generation: Make, run: Make
) -> None:
    options = {"cpu_blocks": BLOCKS, "has_peers": True, "peer_host": "127.0.0.1"}
    (one, tiers), (other, other_tiers) = tiered(**options), tiered(**options)
    want = answers(one, PROMPTS[:1])[0][0]
    generation = make_generation(PROMPTS[0])
    generation.choices[0].sequence.peer = (tiers.manager.peer_address, 10)
    other.add(generation)
    run(other)
    assert generation.reply.tokens == want
    assert generation.choices[0].sequence.cached_tokens == 36
    assert other_tiers.manager.book.counts.onboarded[Tier.PEER] == 9
