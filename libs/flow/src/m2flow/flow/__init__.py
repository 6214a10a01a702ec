"""From a macro flow, written once, to a micro flow in time and space."""
