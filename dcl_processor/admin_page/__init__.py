"""An app for the Django admin: a page about all processors, and actions on their rows."""
