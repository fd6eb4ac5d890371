"""Where prompts are resumed: the rules of spec/serving.md 3.1, case by case and as a whole."""

from __future__ import annotations

import pytest

from headrace.errors import ConfigError
from headrace.kv.resume import COLD, Resume, ResumeRules, plan_resume

WINDOW, KEEP = 128, 140
# (mode, truncation) -> rules of DeepSeek-V4.1-Flash.
RULES = {
    ("bounded", True): ResumeRules("bounded", KEEP, WINDOW, True),
    ("bounded", False): ResumeRules("bounded", 1, WINDOW, False),
    ("exact", True): ResumeRules("exact", KEEP, 2560, True),
    ("exact", False): ResumeRules("exact", 1, 5120, False),
    ("off", True): ResumeRules("off", KEEP, 0, True),
    ("off", False): ResumeRules("off", 1, 0, False),
}


def specified(n, available, records, images, mode, truncate):
    """The pseudo code of the specification (rule 4's minimum of 256 included)."""
    keep, layers = (KEEP, 20) if truncate else (1, 40)
    k = min(available, max(0, (n - keep) // 128))
    while k > 0 and any(first < 128 * k < end for first, end in images):
        k -= 1
    while k > 0:
        hit = 128 * k
        if truncate and k in records:
            return Resume(hit, 0)
        if mode == "off":
            k -= 1
            continue
        rows = WINDOW
        if mode == "exact":
            rows = -(-(WINDOW + (layers - 1) * (WINDOW - 1)) // 128) * 128
        return Resume(hit, rows) if hit > rows and hit >= 256 else COLD
    return COLD


@pytest.mark.parametrize(("mode", "truncate"), RULES)
@pytest.mark.parametrize("records", [frozenset(), frozenset({1, 3, 30}), frozenset(range(100))])
def test_agrees_with_the_specification(mode, truncate, records):
    for n in [1, 127, 128, 256, 257, 258, 395, 396, 397, 2827, 2828, 5248, 5249, 9000]:
        for available in (0, 1, 2, 3, 19, 20, 21, 40, 41, 100):
            for images in ((), ((200, 300), (2500, 5200))):
                if mode == "off" and images:
                    continue  # the specification leaves images between two records open
                got = plan_resume(
                    RULES[mode, truncate],
                    n,
                    available,
                    has_window_record=records.__contains__,
                    images=images,
                )
                assert got == specified(n, available, records, images, mode, truncate)


@pytest.mark.parametrize(
    ("mode", "truncate", "shortest"),
    [
        ("bounded", True, 396),
        ("bounded", False, 257),
        ("exact", True, 2828),
        ("exact", False, 5249),
    ],
)
def test_shortest_prompt_that_hits(mode, truncate, shortest):
    rules = RULES[mode, truncate]
    assert rules.shortest_prompt == shortest
    assert plan_resume(rules, shortest, 1000).hit_tokens == rules.minimum_hit
    assert plan_resume(rules, shortest - 1, 1000) == COLD


def test_pc6_every_long_enough_prompt_hits_in_every_configuration():
    for window in (16, 64, 128, 200, 256, 300):
        for keep in (1, 140, window + 12):
            for mode, rows in (("bounded", window), ("exact", 128 * (window // 16))):
                rules = ResumeRules(mode, keep, rows, False)
                units = max(2, rows // 128 + 1)
                for n in range(keep + 128 * units, keep + 128 * units + 300, 37):
                    found = plan_resume(rules, n, n // 128)
                    assert found.hit_tokens == (n - keep) // 128 * 128 > 0
                    assert found.replay_rows == rows <= found.hit_tokens


def test_pc8_reuse_is_the_prefix_less_keep_rounded_to_the_grain():
    rules = RULES["bounded", True]
    for cached in range(2, 470):
        found = plan_resume(rules, cached * 128 + 5000, cached)
        assert found == Resume(cached * 128, WINDOW)
        assert found.start == cached * 128 - WINDOW
        same = plan_resume(rules, cached * 128, cached)
        assert same.hit_tokens == (0 if cached < 4 else (cached * 128 - KEEP) // 128 * 128)


def test_no_hit_ends_inside_an_image():
    rules = RULES["bounded", True]
    assert plan_resume(rules, 3000, 20, images=[(1000, 2700)]).hit_tokens == 896
    assert plan_resume(rules, 3000, 20, images=[(2560, 2700)]).hit_tokens == 2560
    assert plan_resume(rules, 3000, 20, images=[(100, 2700)]) == COLD
    # The image before the last one is stepped over too.
    assert plan_resume(rules, 3000, 20, images=[(500, 1020), (1010, 2700)]).hit_tokens == 384


def test_first_chunk_holds_the_replay_and_one_block():
    assert RULES["bounded", True].first_chunk_tokens == 256
    assert RULES["exact", True].first_chunk_tokens == 2688


@pytest.mark.parametrize("arguments", [("always", 1, 0), ("bounded", 0, 128), ("bounded", 1, -1)])
def test_impossible_rules_are_refused(arguments):
    with pytest.raises(ConfigError):
        ResumeRules(*arguments, windows_suffice=False)
