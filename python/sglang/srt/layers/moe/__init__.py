"""Expert layers: their kernels, and the transport between tokens and experts."""
