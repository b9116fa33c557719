"""Where ranks run: their seats on one machine, on several, and on the machines of a Ray cluster."""
