"""Speculative decoding on one rank: the product of what a draft must not change, and the drafts for it."""
