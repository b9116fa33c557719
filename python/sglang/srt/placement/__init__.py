"""The picture and the table of a layout: which rank holds what, and in which groups it stands."""
