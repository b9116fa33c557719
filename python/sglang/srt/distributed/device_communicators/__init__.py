"""Tensor collectives inside one group: exchanges over gloo on the CPU, the backend's own elsewhere.

Built by `communicators`, read by `GroupCoordinator`. Must not count calls, translate errors or know a
group's name.
"""
