"""A small shop that sends its shipped e-mails with dcl_processor."""
