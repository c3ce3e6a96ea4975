"""TensorChild: child process that writes large tensor responses as messages."""

import os

from dynamo.core.child_process import serve
from dynamo.core.errors import Unknown
from dynamo.grpc.tensors import ResponseForm, serialized_response


def write(job: tuple[str, str | None, bool, bool, bytes]) -> tuple[str, bytes]:
    """Return what is wrong with a worker's response, and its message if nothing is."""
    codec, request_id, is_raw, is_streamed, data = job
    try:
        return "", serialized_response(data, codec, ResponseForm(request_id, is_raw, is_streamed))
    except Unknown as error:
        return str(error), b""


if __name__ == "__main__":
    status = serve(write)
    os._exit(status)  # Skip freeing millions of objects one by one.
