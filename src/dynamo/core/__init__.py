"""Domain-independent infrastructure: errors, options, clocks, tasks, codecs, logs, metrics.

Contents: code that is not specific to model serving. Must not depend on workers, models, tokens or requests.
This package is the only reader of `os.environ` and the only place that defines the format of log lines.
"""
