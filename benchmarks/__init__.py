"""Benchmarks: each measures one claim of the documentation against the released system, in one run.

Run from the root of the checkout: `python -m benchmarks.frontend_cpu`. The benchmarks are not installed with the
package.
"""
