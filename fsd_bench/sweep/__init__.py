"""Measure what rules cost and win: sweep over rules, read a report, choose a setting that keeps a promise.

``fsd-bench sweep`` is :func:`.runner.sweep`, ``fsd-bench calibrate`` is :func:`.calibrate.calibrate`; see
docs/measuring.md.
"""
