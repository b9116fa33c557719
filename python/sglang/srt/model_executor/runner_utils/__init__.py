"""What graph runners share."""
