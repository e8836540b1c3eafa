"""An app whose processors cannot run."""
