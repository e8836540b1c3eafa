"""The run: passes, limits, and the report in the making."""
