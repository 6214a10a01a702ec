"""Reinforcement learning of reasoning models."""
