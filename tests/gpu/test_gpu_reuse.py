"""What is resumed after a prefix hit, forked or preempted equals a cold run, on a card."""

from __future__ import annotations

from tests.equivalence.conftest import tiny_dir
from tests.equivalence.test_engine_reuse import (
    bench,
    test_a_request_that_resumes_equals_a_cold_one,
    test_choices_equal_single_requests,
    test_preempted_twice_with_the_cache_on,
)

__all__ = [
    "bench",
    "test_a_request_that_resumes_equals_a_cold_one",
    "test_choices_equal_single_requests",
    "test_preempted_twice_with_the_cache_on",
    "tiny_dir",
]
