"""Embedded engine: transformer inference on numpy, for laptops, tests and getting started.

The package covers everything between input and output token ids. `checkpoint`, `architecture` and `rope` read a model;
`model` and `attention` compute it; `blocks` and `scheduler` decide, without I/O, which tokens are computed next and which
blocks store them; `sampler` chooses tokens; `engine` runs the step thread. `config`, `convert` and `__main__`
exist in every engine adapter.

The package must not depend on text (the frontend has the tokenizer), routers or planes; its only interface to the worker
is `dynamo.backend.engine`.
"""
