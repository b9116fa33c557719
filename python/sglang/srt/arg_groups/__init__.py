"""Configuration: declared fields, the command line, one resolution pass, refusals.

Read by the record, the context and the entry points. Must not import the engine, torch or anything above
floor 1.
"""
