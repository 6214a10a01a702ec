"""The messages and services that the m2flow packages share."""
