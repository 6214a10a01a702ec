"""Adaptive communication: channels, send and receive, weight transfer."""
