"""Metrics: cache and load from the metrics pages of servers."""

from hypothesis import given
from hypothesis import strategies as st

from dynamo.openai_proxy.metrics import CacheShape, cache_shape, loads_of, samples_of
from dynamo.protocols.load import WorkerLoad

VLLM = """# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="a \\"b\\", {c}"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="200"} 1.0
vllm:cache_config_info{block_size="32",engine="1",num_gpu_blocks="200"} 1.0
python_info 3.0
"""


def test_vllm_metrics_contain_the_load_of_each_rank() -> None:
    samples = list(samples_of(VLLM))
    assert cache_shape(samples) == CacheShape(32, 200, 2)
    assert loads_of(samples, 200) == [
        WorkerLoad(dp_rank=0, kv_total_blocks=200, running_requests=2, waiting_requests=4),
        WorkerLoad(
            dp_rank=1, kv_total_blocks=200, running_requests=1, kv_used_blocks=100, active_decode_blocks=100
        ),
    ]  # fmt: skip


def test_sglang_metrics_count_each_rank_once() -> None:
    page = """sglang:num_running_reqs{model_name="m",tp_rank="0"} 3.0
sglang:num_running_reqs{model_name="m",tp_rank="1"} 9.0
sglang:num_queue_reqs{tp_rank="0"} 1
sglang:token_usage{tp_rank="0"} 0.1
"""
    assert loads_of(samples_of(page), 10) == [
        WorkerLoad(kv_total_blocks=10, running_requests=3, waiting_requests=1, kv_used_blocks=1, active_decode_blocks=1)
    ]


def test_llama_cpp_metrics_without_labels_are_read() -> None:
    found = loads_of(samples_of("llamacpp:requests_processing 1\nllamacpp:requests_deferred 2\n"), 0)
    assert found == [WorkerLoad(running_requests=1, waiting_requests=2)]


def test_metrics_page_of_another_server_has_no_load() -> None:
    samples = list(samples_of("http_requests_total 5\nvllm:num_requests_running{} nonsense\nvllm:x\n"))
    assert loads_of(samples, 5) == []
    assert cache_shape(samples) is None


@given(st.text(alphabet='vlm:_{}="0123456789.num_requests_running \n\\'))
def test_any_metrics_page_is_parsed_without_an_error(text: str) -> None:
    loads_of(samples_of("vllm:num_requests_running" + text), 3)
