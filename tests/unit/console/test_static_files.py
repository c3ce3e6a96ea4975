"""Static files: self-contained pages that comply with their own content security policy."""

import re

from dynamo.console.static_files import HEADERS, INDEX, static_files

FILES = static_files()
TEXTS = {name: file.content.decode() for name, file in FILES.items()}


def test_pages_load_no_resources_from_other_origins() -> None:
    namespaces = {"http://www.w3.org/2000/svg"}
    for name, text in TEXTS.items():
        assert set(re.findall(r"https?://[^\s\"'`$)]+", text)) <= namespaces, name
        assert "@import" not in text, name


def test_pages_have_no_inline_scripts_styles_or_handlers() -> None:
    page = TEXTS[INDEX]
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", page) == []
    for name, text in TEXTS.items():
        if name.endswith(".js"):
            assert (
                re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text) == []
            ), name


def test_every_referenced_file_exists() -> None:
    for name in re.findall(r'(?:href|src)="([\w./-]+\.(?:css|js|svg))"', TEXTS[INDEX]):
        assert name in FILES
    for name, text in TEXTS.items():
        folder = name.rpartition("/")[0]
        for path in re.findall(r'from "(\.{1,2}/[\w./-]+)"', text):
            parts = [part for part in f"{folder}/{path}".split("/") if part not in ("", ".")]
            while ".." in parts:
                at = parts.index("..")
                del parts[at - 1 : at + 1]
            assert "/".join(parts) in FILES, f"{name}: {path}"


def test_content_security_policy_allows_only_the_same_origin() -> None:
    policy = HEADERS["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_both_themes_define_the_same_colors() -> None:
    blocks = re.findall(r':root(?:\[data-theme="dark"\])? \{(.*?)\}', TEXTS["base.css"], re.DOTALL)
    light, dark = ({*re.findall(r"(--[\w-]+): #", block)} for block in blocks)
    assert light == dark


def luminance(color: str) -> float:
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.03928 else ((one + 0.055) / 1.055) ** 2.4 for one in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_text_has_enough_contrast_in_both_themes() -> None:
    blocks = re.findall(r':root(?:\[data-theme="dark"\])? \{(.*?)\}', TEXTS["base.css"], re.DOTALL)
    pairs = [
        *((text, back) for text in ("text", "muted", "accent", "bad") for back in ("bg", "surface")),
        ("muted", "raised"), ("on-accent", "accent"), ("text", "accent-soft"), ("accent", "accent-soft"),
        ("good", "good-soft"), ("warn", "warn-soft"), ("bad", "bad-soft"),
    ]  # fmt: skip
    for block in blocks:
        colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        assert [pair for pair in pairs if contrast(colors[pair[0]], colors[pair[1]]) < 4.5] == []
        assert [
            name for name in colors if re.fullmatch(r"s\d", name) and contrast(colors[name], colors["surface"]) < 3
        ] == []
