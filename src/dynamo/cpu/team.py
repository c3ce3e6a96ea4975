"""Team: threads that compute parts of a step side by side.

OpenBLAS uses its own threads for one product at a time; everything between two products would use one core. For a prefill, the
engine therefore divides the tokens over threads, and each of them computes its products with one thread.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

from dynamo.cpu import blas

Task = Callable[[], object]


class Team:
    """The calling thread and `size - 1` others. Products outside of `side_by_side` use the threads of OpenBLAS."""

    def __init__(self, size: int, put_blas_threads: Callable[[int], object]) -> None:
        self.size = size
        self._put_blas_threads = put_blas_threads
        self._others = ThreadPoolExecutor(size - 1, thread_name_prefix="dynamo-cpu") if size > 1 else None

    @classmethod
    def of_blas(cls) -> "Team":
        """Return a team with as many threads as OpenBLAS has; one thread if numpy does not use OpenBLAS."""
        threads = blas.loaded()
        return cls(1, lambda _: None) if threads is None else cls(max(1, threads.get()), threads.put)

    @contextmanager
    def side_by_side(self) -> Iterator[None]:
        """Limit OpenBLAS to one thread per product, so that the threads of this team do not wait for each other."""
        if self.size == 1:
            yield
            return
        self._put_blas_threads(1)
        try:
            yield
        finally:
            self._put_blas_threads(self.size)

    def run(self, tasks: Iterable[Task]) -> None:
        """Run the tasks, which are taken in this order, and return when all have ended. Raise the error of one that fails."""
        left = deque(tasks)

        def work() -> None:
            try:
                while left:
                    try:
                        task = left.popleft()
                    except IndexError:  # Another thread took the last one.
                        return
                    task()
            finally:
                left.clear()  # Empty already, unless the step has failed: then no more of it is computed.

        helpers = min(self.size, len(left)) - 1
        if self._others is None or helpers < 1:
            work()
            return
        started = [self._others.submit(work) for _ in range(helpers)]
        try:
            work()
        finally:
            wait(started)
        for one in started:
            one.result()
