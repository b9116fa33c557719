"""How settings are written down: command line, YAML file, keywords, all with the same names."""
