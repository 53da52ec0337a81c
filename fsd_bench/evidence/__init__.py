"""What rules cost and what they win: sweep over rules, look at a report, choose a setting that keeps a promise.

``fsd-infer sweep`` is :func:`.sweep.sweep`, ``fsd-infer calibrate`` is :func:`.calibrate.calibrate`; see
docs/evidence.md.
"""
