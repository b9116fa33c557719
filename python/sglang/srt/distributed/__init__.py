"""Process groups of the ranks, built once at the published widths.

Read by layers, workers and the scheduler, which take groups from `get_parallel()` and collectives from
`communication_op`. Must not be imported by `runtime_context`, which finds the getters by dotted name.
"""
