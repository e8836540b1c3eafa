"""Other people's packages and settings around a run: what holds, or which sentence refuses."""
