"""A card is read and written as upstream writes it."""

import json

import msgspec

from dynamo.protocols.model_card import ModelRecord

PUBLISHED = """{"type":"Model","namespace":"dynamo","component":"backend","endpoint":"generate",
"instance_id":12226163502239779870,"card_json":{"display_name":"tiny","slug":"tiny","source_path":"DIR",
"model_info":{"hf_config_json":{"path":"DIR/config.json","checksum":"blake3:aa","size":717}},
"tokenizer":{"hf_tokenizer_json":{"path":"DIR/tokenizer.json","checksum":"blake3:bb","size":1113146}},
"prompt_formatter":{"hf_tokenizer_config_json":{"path":"DIR/tokenizer_config.json","checksum":"blake3:cc","size":3252}},
"chat_template_file":{"hf_chat_template":{"is_custom":false,"file":{"path":"DIR/t.jinja","checksum":"blake3:ee","size":1}}},
"gen_config":{"hf_generation_config_json":{"path":"DIR/generation_config.json","checksum":"blake3:dd","size":209}},
"architectural_max_context_length":40960,"context_length":0,"kv_cache_block_size":64,"migration_limit":0,
"model_type":"Chat | Completions","model_input":"Tokens","worker_type":"aggregated","needs":[["prefill"]],
"runtime_config":{"context_length":0,"total_kv_blocks":16384,"max_num_seqs":256,"max_num_batched_tokens":8192,
"tool_call_parser":null,"reasoning_parser":null,"tool_call_arguments_format":"json_string","structural_tag_mode":"off",
"structural_tag_scope":"auto","structural_tag_schema":"auto","exclude_tools_when_tool_choice_none":true,
"data_parallel_start_rank":0,"data_parallel_size":1,"enable_local_indexer":true,"kv_event_publishing_enabled":true,
"runtime_data":{"output_replay_consumer":true},"enable_eagle":false},"media_decoder":null,"media_fetcher":null}}"""
"""Record that the released mocker writes into discovery, with other paths and checksums."""


def test_upstream_model_record_round_trips() -> None:
    record = msgspec.json.decode(PUBLISHED, type=ModelRecord)
    assert record.instance_id == 12226163502239779870
    assert record.card_json.needs == [["prefill"]]
    assert msgspec.json.decode(msgspec.json.encode(record)) == json.loads(PUBLISHED)
    written = list(msgspec.json.decode(msgspec.json.encode(record))["card_json"])
    assert written == list(json.loads(PUBLISHED)["card_json"])


def test_fields_of_a_later_release_are_ignored() -> None:
    later = json.loads(PUBLISHED)
    later["card_json"]["invented_later"] = later["card_json"]["runtime_config"]["invented_later"] = 1
    assert msgspec.json.decode(json.dumps(later), type=ModelRecord).card_json.slug == "tiny"
