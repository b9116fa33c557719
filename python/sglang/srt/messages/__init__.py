"""Messages that cross a process border, and the words requests are made of."""
