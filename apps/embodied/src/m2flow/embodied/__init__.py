"""Reinforcement learning of embodied policies."""
