"""Greetings and questions about the model itself, so that `make serve` has something to say."""

from __future__ import annotations

import random

from headrace.eval.items import Draw, Sample, single

_HELP = "Hello! How can I help you?"
_SELF = "I am a small test model of headrace."
_SKILLS = "I can call tools, write JSON, add, sort, count, copy and recall facts."
_TALK = (
    ("Hello", _HELP),
    ("Hello!", _HELP),
    ("Hi", _HELP),
    ("Hi!", _HELP),
    ("Hey", _HELP),
    ("hello", _HELP),
    ("hi", _HELP),
    ("Hello, how are you?", "I am fine, thank you. How can I help you?"),
    ("How are you?", "I am fine, thank you. How can I help you?"),
    ("Good morning", "Good morning! How can I help you?"),
    ("Good morning!", "Good morning! How can I help you?"),
    ("Good evening", "Good evening! How can I help you?"),
    ("Who are you?", _SELF),
    ("What are you?", _SELF),
    ("What is your name?", _SELF),
    ("Which model are you?", _SELF),
    ("Are you a human?", "No, I am a small test model of headrace."),
    ("What can you do?", _SKILLS),
    ("What are you good at?", _SKILLS),
    ("How can you help me?", _SKILLS),
    ("Help", _SKILLS),
    ("Thanks", "You are welcome."),
    ("Thank you", "You are welcome."),
    ("Thank you!", "You are welcome."),
    ("Bye", "Goodbye!"),
    ("Goodbye", "Goodbye!"),
    ("Tell me a joke.", "I am too small for jokes."),
    ("Write a poem.", "I am too small for poems."),
    ("Are you there?", "Yes, I am here."),
    ("Ping", "Pong."),
    ("Say hello.", "Hello!"),
    ("Yes", "Good."),
    ("No", "All right."),
)


def draw(rng: random.Random, options: Draw) -> Sample:
    """One remark and the reply."""
    question, text = rng.choice(_TALK)
    return single(rng, "small_talk", "all", question, text, "A short reply is enough.", options)
