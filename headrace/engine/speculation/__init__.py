"""Speculative decoding in the engine: how many drafts a step verifies, and at what price.

`policy.py` (budget and split of a step), `controller.py` (what the engine calls), `rounds.py`
(known survivals), `cost.py` and `curve.py` (seconds of a step), `curve_cache.py` (curves on disk),
`confidence.py` (calibration), `estimator.py` (confidence learned online). No torch in any of these.
"""
