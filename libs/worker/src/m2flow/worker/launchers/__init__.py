"""Adapters that start ranks: as threads of this process, as processes of this machine, or through Ray."""
