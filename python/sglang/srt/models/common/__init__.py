"""Decoder parts that several architectures share."""
