"""The layout lab: one scenario over many layouts, compared with one rank."""
