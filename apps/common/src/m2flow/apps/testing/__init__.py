"""What tests of apps need: a run directory to read, and an app that trains nothing in no time."""

from m2flow.apps.testing.example import example_run, example_trace

__all__ = ["example_run", "example_trace"]
