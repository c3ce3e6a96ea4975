"""Environment variables that matter to inference, with secrets hidden."""

from dynamo.core.config import environ

DEFAULT_ENV_PREFIXES = [
    "DYN_",
    "CUDA_",
    "NCCL_",
    "HF_",
    "TRANSFORMERS_",
    "SGLANG_",
    "SGL_",
    "MC_",
    "VLLM_",
    "TENSORRT_",
    "TORCH_",
    "UCX_",
    "NIXL_",
    "OMPI_",
    "LLM_",
    "TLLM_",
    "TRT_LLM_",
    "TRTLLM_",
    "NVIDIA_",
    "NSYS_",
    "GENERATE_CU_",
    "OVERRIDE_",
    "TOKENIZERS_",
    "DISABLE_TORCH_",
    "PYTORCH_",
    "ENABLE_PERFECT_ROUTER",
    "FLA_",
    "NEMOTRON_",
]
SENSITIVE_PATTERNS = ["TOKEN", "API_KEY", "SECRET", "PASSWORD", "CREDENTIAL", "AUTH"]
REDACTED = "<REDACTED>"


def get_environment_vars(
    prefixes: list[str] | None = None,
    include_sensitive: bool = False,
    additional_vars: set[str] | None = None,
) -> dict[str, str]:
    """Return the variables with one of the prefixes, and the additional ones."""
    wanted = tuple(DEFAULT_ENV_PREFIXES if prefixes is None else prefixes)
    more = additional_vars or set()
    return {
        name: REDACTED if _is_sensitive(name) and not include_sensitive else value
        for name, value in environ().items()
        if name.startswith(wanted) or name in more
    }


def _is_sensitive(name: str) -> bool:
    return any(pattern in name.upper() for pattern in SENSITIVE_PATTERNS)
