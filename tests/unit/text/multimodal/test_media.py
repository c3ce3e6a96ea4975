"""Media travel by their URLs, in the order in which a conversation shows them."""

from typing import Any

import pytest
from tests.scripted_engine.stack import open_stack

from dynamo.core.codec import json_encode
from dynamo.core.errors import InvalidArgument
from dynamo.protocols.openai import ChatMessage, decode_chat
from dynamo.text.multimodal.media import has_media, media_of, shown_messages
from dynamo.text.multimodal.source import FetchLimits

IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png", "detail": "low"}}
INLINE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
VIDEO = {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}
AUDIO = {"type": "audio_url", "audio_url": {"url": "https://example.com/a.wav"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "BBBB", "format": "wav"}}
TEXT = {"type": "text", "text": "what?"}


def messages(*contents: Any) -> list[ChatMessage]:
    turns = [{"role": "user", "content": content} for content in contents]
    return decode_chat(json_encode({"model": "m", "messages": turns})).messages


def test_media_parts_are_listed_by_kind_in_order() -> None:
    output = messages([TEXT, IMAGE, SOUND], "hm", [VIDEO, INLINE, AUDIO])
    assert has_media(output)
    assert media_of(output) == {
        "image_url": [{"Url": "https://example.com/a.png"}, {"Url": "data:image/png;base64,AAAA"}],
        "audio_url": [{"Url": "data:audio/wav;base64,BBBB"}, {"Url": "https://example.com/a.wav"}],
        "video_url": [{"Url": "https://example.com/a.mp4"}],
    }


def test_media_list_of_a_text_conversation_is_empty() -> None:
    output = messages("hi", [TEXT])
    assert not has_media(output)
    assert media_of(output) == {}


def test_media_list_omits_repeated_inline_data() -> None:
    assert shown_messages(messages([TEXT, IMAGE, INLINE, SOUND], "hm")) == [
        {
            "role": "user",
            "content": [
                TEXT,
                IMAGE,
                {"type": "image_url", "image_url": {"url": ""}},
                {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
            ],
        },
        {"role": "user", "content": "hm"},
    ]


@pytest.mark.parametrize(
    ("part", "field", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "ftp://example.com/a"}}, "image_url.url", "http://, https://"),
        ({"type": "image_url", "image_url": {"url": "data:text/html;base64,AAAA"}}, "image_url.url", "image/"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAA"}}, "video_url.url", "base64"),
        ({"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64," + "A" * 100}}, "audio_url.url", "at most"),
        ({"type": "input_audio", "input_audio": {"data": "A", "format": "wav"}}, "input_audio.data", "base64"),
        ({"type": "input_audio", "input_audio": {"data": "A" * 104, "format": "wav"}}, "input_audio.data", "at most"),
    ],
)
def test_media_error_names_an_unreadable_part(part: Any, field: str, message: str) -> None:
    output = messages("hm", [TEXT, part])
    with pytest.raises(InvalidArgument, match=message) as raised:
        media_of(output, FetchLimits(data_url_bytes_max=100))
    assert raised.value.param == f"messages[1].content[1].{field}"


async def test_media_error_reaches_the_client_with_its_part() -> None:
    async with open_stack() as stack:
        part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAA"}}
        refused = await stack.chat(messages=[{"role": "user", "content": [TEXT, part]}])
        assert refused.status == 400
        assert refused.json["error"]["param"] == "messages[0].content[1].image_url.url"
