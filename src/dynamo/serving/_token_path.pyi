from collections.abc import Callable, Sequence

from dynamo.serving.choice import Choice
from dynamo.serving.token_path import TokenReceiver

def on_token(self: TokenReceiver, token_id: int) -> None: ...
def write_waiting(waiting: Sequence[Choice], now_s: float, other: Callable[[Choice, float], None], /) -> None: ...
