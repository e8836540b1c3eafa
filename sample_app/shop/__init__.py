"""A small real shop whose orders are processed by dcl_processor."""
