"""What the m2flow applications share."""
