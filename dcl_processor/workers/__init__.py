"""Workers: the watch, its stop, several processes of one command line, and signs of their life."""
