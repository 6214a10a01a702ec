"""Profiling-guided scheduling: cost models, plan search, simulator, explanation."""
