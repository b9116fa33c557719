"""The key/value cache: pools of slots, the allocators that hand them out, and the prefix caches that share
them.
"""
