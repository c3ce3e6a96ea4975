"""Container images of a graph, derived from the profiler's: same registry, path, tag and digest, another name."""

RUNTIME = {"vllm": "vllm-runtime", "sglang": "sglang-runtime", "trtllm": "tensorrtllm-runtime"}
PLANNER = "dynamo-planner"


def backend_image(profiler_image: str, backend: str) -> str:
    """Return the image of an engine's workers."""
    return renamed(profiler_image, RUNTIME[backend])


def planner_image(profiler_image: str) -> str:
    """Return the image of the planner."""
    return renamed(profiler_image, PLANNER)


def renamed(image: str, name: str) -> str:
    """Return an image reference with another last path element."""
    path, slash, last = image.rpartition("/")
    name_and_tag, at, digest = last.partition("@")
    _, colon, tag = name_and_tag.partition(":")
    return f"{path}{slash}{name}{colon}{tag}{at}{digest}"
