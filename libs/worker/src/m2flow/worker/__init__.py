"""Devices, placement, workers and groups, launchers, locks, engine adapters."""
