"""Random tokens are generated once and reused."""

from dynamo.mocker.simulation.tokens import IDS, TokenSource


def test_token_ids_are_in_the_vocabulary_and_not_excluded() -> None:
    source = TokenSource(10, excluded={2, 7}, seed=1)
    assert set(source.ids) == {0, 1, 3, 4, 5, 6, 8, 9}


def test_token_ids_are_uniformly_distributed() -> None:
    source = TokenSource(16, seed=1)
    share = [source.ids.count(token) / IDS for token in range(16)]
    assert min(share) > 0.055
    assert max(share) < 0.07


def test_equal_seeds_produce_equal_tokens() -> None:
    assert TokenSource(1000, seed=5).ids == TokenSource(1000, seed=5).ids
    assert TokenSource(1000, seed=5).ids != TokenSource(1000, seed=6).ids


def test_token_source_wraps_around_at_its_end() -> None:
    source = TokenSource(1000, seed=1)
    assert source.slice(IDS - 2, IDS + 2) == [*source.ids[-2:], *source.ids[:2]]
