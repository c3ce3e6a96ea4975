"""Shared pages: which blocks of a prompt the store of all workers has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.errors import InvalidArgument
from dynamo.kv_router.hicache import HicacheLayout, HicachePages, ObjectEvent, held_from, page_names, read_layout

TOKENS = list(range(1, 13))


def pages(layout: HicacheLayout | None = None, pages_max: int = 100) -> HicachePages:
    found = HicachePages(pages_max)
    found.lay_out(layout or HicacheLayout(page_size=4))
    return found


def objects(layout: HicacheLayout, name: bytes) -> list[str]:
    return [f"{layout.prefix}{name.hex()}{suffix}" for suffix in layout.suffixes()]


def stored(*keys: str) -> list[ObjectEvent]:
    return [ObjectEvent("stored", key) for key in keys]


def filled(layout: HicacheLayout, *numbers: int) -> HicachePages:
    found = pages(layout)
    names = page_names(TOKENS, layout.page_size, is_eagle=layout.is_eagle)
    found.apply(1, stored(*(key for number in numbers for key in objects(layout, names[number]))))
    return found


def test_hicache_page_names_equal_those_of_sglang() -> None:
    assert [name.hex() for name in page_names(range(1, 11), 4)] == [
        "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72",
        "4ebfa8a1f3c341517621838c6e1b9aa350307e3f00b3cbd1a07ef740f54396d6",
    ]
    assert [name.hex() for name in page_names([10, 11, 12, 13, 14], 2, is_eagle=True)] == [
        "4bde82677ba8b6de843da1713b58a439678ec01b642bbdcffec4acfa81b0ec8e",
        "75ab93a767bad1e254945d1a0ccfa1588d6ebb803303e412d984baedcbbf04b9",
    ]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3]])
@pytest.mark.parametrize("is_eagle", [False, True])
def test_hicache_prompt_shorter_than_a_page_has_no_pages(tokens: list[int], is_eagle: bool) -> None:
    assert page_names(tokens, 4, is_eagle=is_eagle) == []


@pytest.mark.parametrize(
    ("layout", "suffixes"),
    [
        (HicacheLayout(page_size=4), ["_0_k", "_0_v"]),
        (
            HicacheLayout(page_size=4, tp_size=2, pp_size=2),
            ["_0_0_k", "_0_0_v", "_1_0_k", "_1_0_v", "_0_1_k", "_0_1_v", "_1_1_k", "_1_1_v"],
        ),
        (HicacheLayout(page_size=4, is_mla_model=True), ["__k"]),
        (HicacheLayout(page_size=4, is_mla_model=True, pp_size=2), ["_0_k", "_1_k"]),
        (
            HicacheLayout(page_size=4, tp_size=1, tp_lcm_size=2, should_split_heads=True),
            ["_0_k", "_0_v", "_1_k", "_1_v"],
        ),
    ],
)
def test_hicache_page_has_as_many_objects_as_the_engine_stores(layout: HicacheLayout, suffixes: list[str]) -> None:
    assert layout.suffixes() == suffixes


def test_hicache_key_has_the_engine_prefix_before_the_tag() -> None:
    assert HicacheLayout(page_size=4).prefix == ""
    assert HicacheLayout(page_size=4, extra_backend_tag="tag").prefix == "tag_"
    assert HicacheLayout(page_size=4, extra_backend_tag="tag", key_prefix="tag_model").prefix == "tag_model_"


@pytest.mark.parametrize("prefix", [None, "tag_some-model"])
def test_hicache_finds_stored_pages(prefix: str | None) -> None:
    found = filled(HicacheLayout(page_size=4, tp_size=2, key_prefix=prefix), 0, 1)

    assert found.find(TOKENS) == ((0, 2),)
    assert found.find([*TOKENS[:4], 99, *TOKENS[5:]]) == ((0, 1),)
    assert found.find([99, *TOKENS[1:]]) == ()


def test_hicache_page_with_a_missing_object_is_absent() -> None:
    layout = HicacheLayout(page_size=4, tp_size=2)
    found, name = pages(layout), page_names(TOKENS, 4)[0]
    found.apply(1, stored(*objects(layout, name)[:-1]))
    assert found.find(TOKENS) == ()

    found.apply(2, stored(objects(layout, name)[-1]))
    assert found.find(TOKENS) == ((0, 1),)

    found.apply(3, [ObjectEvent("removed", objects(layout, name)[0])])
    assert found.find(TOKENS) == ()


def test_hicache_reports_holes() -> None:
    found = filled(HicacheLayout(page_size=4), 0, 2)

    assert found.find(TOKENS) == ((0, 1), (2, 3))


def test_hicache_ignores_a_repeated_batch() -> None:
    found = filled(HicacheLayout(page_size=4), 0)

    assert found.apply(1, []) and found.find(TOKENS) == ((0, 1),)


def test_hicache_drops_earlier_pages_after_a_missing_batch() -> None:
    layout = HicacheLayout(page_size=4)
    found = filled(layout, 0)

    assert not found.apply(3, stored(*objects(layout, page_names(TOKENS, 4)[1])))
    assert found.find(TOKENS) == ((1, 2),)


def test_hicache_drops_all_pages_when_the_layout_changes() -> None:
    found = filled(HicacheLayout(page_size=4), 0)

    found.lay_out(HicacheLayout(page_size=4, tp_size=2))

    assert len(found) == 0 and found.apply(7, [])


@pytest.mark.parametrize(
    "event",
    [
        ObjectEvent("stored", None),
        ObjectEvent("stored", "short_0_k"),
        ObjectEvent("stored", "g" * 64 + "_0_k"),
        ObjectEvent("stored", "0" * 64 + "_9_k"),
        ObjectEvent("stored", "0" * 64 + "_0_k", "another-tenant"),
        ObjectEvent("removed", "0" * 64 + "_0_k"),
        ObjectEvent("renamed", "0" * 64 + "_0_k"),
    ],
)
def test_hicache_ignores_foreign_keys(event: ObjectEvent) -> None:
    found = pages()

    assert found.apply(1, [event]) and len(found) == 0


def test_hicache_evicts_the_oldest_page() -> None:
    layout = HicacheLayout(page_size=4, is_mla_model=True)
    found = pages(layout, pages_max=2)
    found.apply(1, stored(*(key for name in page_names(TOKENS, 4) for key in objects(layout, name))))

    assert found.find(TOKENS) == ((1, 3),)


def test_hicache_layout_is_read_from_a_card_and_ignores_unknown_fields() -> None:
    given = {"backend": "mooncake", "page_size": 64, "tp_size": 2, "pp_size": 1, "something": 1}

    assert read_layout(given) == HicacheLayout(page_size=64, tp_size=2)


@pytest.mark.parametrize(
    "given", ["text", {}, {"page_size": "x"}, {"page_size": 0}, {"page_size": 4, "tp_size": 1 << 20}]
)
def test_hicache_refuses_an_invalid_layout(given: object) -> None:
    with pytest.raises(InvalidArgument, match="sglang_hicache_mooncake"):
        read_layout(given)


@given(st.lists(st.booleans(), max_size=12), st.integers(0, 12))
def test_hicache_held_from_counts_consecutive_pages(held: list[bool], depth: int) -> None:
    runs, begin = [], None
    for place, one in enumerate([*held, False]):
        if one and begin is None:
            begin = place
        elif not one and begin is not None:
            runs.append((begin, place))
            begin = None
    expected = 0
    while depth + expected < len(held) and held[depth + expected]:
        expected += 1

    assert held_from(tuple(runs), depth) == expected
