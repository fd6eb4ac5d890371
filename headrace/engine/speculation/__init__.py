"""Speculative decoding in the engine: how drafts are made, chosen, checked and accepted.

Policy, without torch: `policy.py` (budget and split of a step), `controller.py` (what the engine
calls), `rounds.py` (known survivals), `cost.py` and `curve.py` (seconds of a step), `confidence.py`
(calibration), `estimator.py` (confidence learned online). On the device side: `drafts.py` (who
drafts, and the pool), `draft_picker.py` (drawing drafts), `verify.py` and `rejection.py` (checking
them).
"""
