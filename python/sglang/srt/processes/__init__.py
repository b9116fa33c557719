"""The processes of an engine: how ranks are placed, started, spoken to, watched and ended."""
