"""The key/value cache: pools of slots, allocators that hand them out, prefix caches that share them."""
