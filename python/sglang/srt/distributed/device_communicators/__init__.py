"""How tensors travel inside one group: exchanges over gloo on the CPU, the backend's own collectives
elsewhere.

Built and read by ``GroupCoordinator`` only. Must not count calls, translate errors or know a group's name.
"""
