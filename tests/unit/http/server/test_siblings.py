"""Processes that share a port talk to each other."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dynamo.http.server.siblings import Siblings


async def say_metrics(question: str) -> str:
    return "# TYPE p_total counter\np_total 2\n"


async def say_back(question: str) -> str:
    return f"heard {question}"


@pytest.fixture
async def others(tmp_path: Path) -> AsyncIterator[list[Siblings]]:
    found = [Siblings(str(tmp_path), index) for index in range(3)]
    for one in found:
        one.answer("metrics", say_metrics)
        one.answer("say", say_back)
        await one.start()
    yield found
    for one in found:
        await one.close()


async def test_one_scrape_sees_everybody(others: list[Siblings]) -> None:
    assert "p_total 5" in await others[0].metrics("# TYPE p_total counter\np_total 1\n")


async def test_a_question_reaches_all_others(others: list[Siblings]) -> None:
    assert await others[1].query("say it again") == ["heard it again", "heard it again"]


async def test_who_is_gone_is_left_out_and_takes_its_place_again(others: list[Siblings], tmp_path: Path) -> None:
    await others[2].close()
    (tmp_path / "2.sock").touch()
    assert await others[0].query("say x") == ["heard x"]
    await others[2].start()
    assert await others[0].query("say x") == ["heard x", "heard x"]


async def test_what_is_no_question_gets_no_answer(others: list[Siblings]) -> None:
    assert await others[0].query("nonsense") == ["", ""]
