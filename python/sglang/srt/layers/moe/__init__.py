"""Expert layers: which experts run where, with which kernels, over which transport."""
