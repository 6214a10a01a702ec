"""Reinforcement-learning algorithms as pure torch functions."""
