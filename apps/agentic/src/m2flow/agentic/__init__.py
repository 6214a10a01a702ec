"""Reinforcement learning of models that call tools."""
